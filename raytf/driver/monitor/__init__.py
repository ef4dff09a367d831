"""The monitor: an actor that workers and Ray Train's controller report to and that the driver reads.

Each of its roles is a module without Ray: `outbox` (what the driver reads), `progress` (how far the run is and what a
restart costs), `roster` (which ranks are alive), `parking` (saving together). All of them are reached through
`raytf.training.process.monitor_client.MonitorClient`. The entry point is `raytf.driver.monitor.actor.Monitor`.
"""
