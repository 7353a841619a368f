"""What a process says of the requests it works on: log lines and spans, both under the request's id.

In come records of ``logging`` and times that the code measured; out go lines on stderr and, where a collector is given,
OpenTelemetry spans. Prompts, answers and keys must not come in here. Everything but ``otel`` runs without
OpenTelemetry.
"""
