"""The dynamic search: the smallest frames whose restored weights keep a bound on the evaluator's figures."""
