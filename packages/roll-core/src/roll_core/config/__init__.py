"""From YAML files and overrides to a validated config, with every mistake located: `load` and `dump`."""
