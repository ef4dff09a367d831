"""A run with parameter servers, from the driver's side: its processes are placed, watched, and restarted.

The processes are Ray actors in one placement group: the coordinator, the parameter servers and the workers. A worker
that dies is restarted by Ray in its place, at the same address, while the others continue. If a parameter server dies,
its weights are lost, and the coordinator cannot continue with another server in the same process. So if either dies,
all exit and a new group starts from the newest checkpoint. The processes belong to the driver, and end with it. The
entry point is `raytf.parameter_server.group.run_group`.
"""
