"""Pipeline `distill`: a student learns a teacher's next-token distributions."""
