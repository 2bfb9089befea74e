"""How `execute_plan` works: arguments, the nest of axes on the device, and buckets and meshes around it."""
