"""Holding implementations of an op against the float64 reference."""


class Report:
    """What compare() found."""


def compare(op, implementations, inputs):
    raise NotImplementedError("fidelta.compare")
