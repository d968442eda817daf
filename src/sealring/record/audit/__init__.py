"""Checks a finished run from its folder alone, and answers claims about it (docs/audits.md).

In the order in which an audit goes:

findings     what can be found wrong, who is at fault, in which record, and what contradicts it
records      whom the auditor believes, the run's log, and its statements, each verified once
chains, traffic, data, artefacts    what statements must agree on
machines     the machines that workers ran on, and what brokers say that they admitted
graph        the run as a graph, and ways through it
claims       what is claimed, and how it is answered
spot_checks  parts of the run, executed again
audit        all of it, and its result
page         the result and the graph as a page that opens offline

Nothing here imports torch.
"""
