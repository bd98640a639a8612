"""The admin plane: an API under /admin/api and a dashboard at /admin on the same values. `routes.admin_router` makes it."""
