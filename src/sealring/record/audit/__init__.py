"""Checks a finished run from its folder alone, and answers claims about it (docs/provenance.md).

In the order in which an audit goes:

trust        whom the auditor believes
hostile      what a folder from a stranger may hold
log_check    the run's log
which_run    the run and the job that all records must be of
records      its statements, each verified once
chains, links, collectives, data, artefacts    what statements must agree on
attestation  the machines that workers ran on
broker_logs  what brokers say that they admitted, against the certificates
findings     who is at fault, in which record, and what contradicts it
graph, build, lineage    the run as a graph, and ways through it
claims, answers, model_file    what is claimed, and how it is answered
spot_checks  parts of the run, executed again
audit, result    all of it
picture, page    the graph as a page that opens offline

Nothing here imports torch.
"""
