"""The operator `modal`: the sum of exponentials."""

from helpers.operators import OperatorTests


class TestModal(OperatorTests):
    tno_type = "modal"
