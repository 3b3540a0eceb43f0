"""What training costs, before and after."""
