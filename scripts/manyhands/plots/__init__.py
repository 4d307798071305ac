"""Draw the workshop's figures: the colours and hatches of `looks`, cards, and the charts that lessons share."""
