"""Simulators behind one small interface; imported only inside environment hosts and by tests.

Nothing here needs more than numpy, gymnasium and the simulator itself: a host may run under another interpreter.
"""
