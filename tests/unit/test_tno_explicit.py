"""The operator `explicit`: one parameter for each lag."""

from helpers.operators import OperatorTests


class TestExplicit(OperatorTests):
    tno_type = "explicit"


class TestExplicitAndShort(OperatorTests):
    tno_type = "explicit"
    fields = {"explicit_length": 20, "decay": None}
