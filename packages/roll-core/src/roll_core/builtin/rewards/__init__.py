"""The rewards that come with ROLL: mathematics by rule, and a function of the user's."""
