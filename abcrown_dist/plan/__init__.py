"""How a verification would be spread over ranks: memory by mode, foretold, and which mode to take."""
