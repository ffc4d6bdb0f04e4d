"""Bound propagation: IBP, backward CROWN, forward mode and alpha-CROWN over B domains at once.

Shape suffixes name tensors: B domains, R rows, N neurons. A pass takes weights, bounds and
relaxation parameters and returns bounds; nothing is stored on graph nodes.
"""
