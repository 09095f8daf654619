"""What `roll-core doctor` looks at on every machine."""
