"""The templates of `roll-core new` have tests, which run where a package was generated."""

collect_ignore = ["src"]
