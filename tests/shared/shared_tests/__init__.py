"""Tests and checks that packages of this repository share, beside the kits of `roll_testing`, which are for all."""
