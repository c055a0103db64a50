"""Strategies that are not in the table yet: proof that the contract holds those that break a shared skeleton first."""
