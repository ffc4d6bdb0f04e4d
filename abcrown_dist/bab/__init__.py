"""From a property to refuted disjuncts: clauses over boxes, their bounds at the root, branching."""
