"""The web console: pages for operators and tenants, rendered on the server and mounted into the gateway."""
