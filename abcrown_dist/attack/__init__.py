"""Search for counterexamples, and the judge that confirms them."""
