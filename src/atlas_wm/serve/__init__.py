"""A planner over the network: ``atlas serve RUN``. Its client is :mod:`atlas_wm.client`."""
