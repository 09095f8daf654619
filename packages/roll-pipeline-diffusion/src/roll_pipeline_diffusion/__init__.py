"""Pipeline `reward_flow`: flow models for images and video, trained on rewards, preferences or data."""
