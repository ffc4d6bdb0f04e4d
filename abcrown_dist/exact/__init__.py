"""Linear and mixed-integer programmes through HiGHS, and only what float64 arithmetic of ours confirms.

A linear programme's answer is the bound that its dual multipliers give when *we* evaluate them, so
that the solver's tolerances cannot make it wrong. A mixed-integer programme has no such certificate;
`mip` says what is demanded of its dual bound instead.
"""
