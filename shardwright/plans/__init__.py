"""Plans as frozen data: shardings, layouts, stages, and their JSON."""
