"""Harness, plots and printed reports of the lessons: a module for each, with the name of its script and its checks.

A lesson imports its own module, never another's: what two lessons use is in the package to which it belongs.
"""
