"""Places, watches and restarts the processes of a run with parameter servers, from the driver.

The processes are Ray actors in one placement group: the coordinator, the parameter servers and the workers. If a worker
dies, Ray restarts it in its place, at the same address, while the others continue. If a parameter server dies, its
weights are lost, and the coordinator's process cannot continue with another server. So if a server or the coordinator
dies, all processes exit and a new group starts from the newest checkpoint. The driver owns the processes, which exit
with it. The entry point is `raytf.parameter_server.group.run_group`.
"""
