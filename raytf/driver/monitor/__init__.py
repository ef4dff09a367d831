"""The driver's ear: an actor that workers and Ray Train's controller talk to and the driver reads.

Each of its roles is a module without Ray: `outbox` (what the driver reads), `progress` (how far the run is and what a
restart costs), `roster` (who is alive), `parking` (saving together). All talk to it through
`raytf.training.monitor_client.MonitorClient`. The entry is `raytf.driver.monitor.actor.Monitor`.
"""
