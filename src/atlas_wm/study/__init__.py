"""Many runs from one description: which commands they take, which are done, and where the rest run."""
