"""The transports that come with roll-core: each module has one, with its sender and its receiver."""
