"""Planted mistakes, and the command that looks which test finds each."""
