"""What the steps of gpu_campaign.py are made of."""
