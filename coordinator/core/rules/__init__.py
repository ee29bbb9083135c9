"""Rules: one small pure function each, with a stable code.

``descriptor`` judges one rank by itself, ``agreement`` the ranks of one world, the others a pair.
"""
