"""A run with parameter servers, from the driver: its processes are placed, watched, and started again.

The processes are Ray actors in one placement group: the coordinator, the parameter servers and the workers. A worker
that dies is started again by Ray in its place, under the same address, while the others go on. Without a parameter
server its weights are lost, and a coordinator whose server was replaced cannot go on in the same process; so when
either dies, all end and a new group begins with the newest checkpoint. They belong to the driver, and end with it.
The entry is `raytf.driver.parameter_server.run.run`.
"""
