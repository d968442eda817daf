"""Checks a finished run from its folder alone, and answers claims about it (docs/audits.md).

In the order of an audit:

findings     what was found wrong: who is at fault, in which record, and what contradicts it
records      whom the auditor trusts, the run's log, and its statements, each verified once
chains, traffic, data, artefacts    what statements must agree on
machines     the machines that workers ran on, and the brokers' logs of whom they admitted
graph        the run as a graph, and the ways through it
claims       the claims, and how they are answered
spot_checks  parts of the run, executed again
audit        the whole audit, and its result
page         the result and the graph as a page that opens offline

Nothing here imports torch.
"""
