"""How the workshop's figures look: the colours and hatches of `looks`, cards, and the charts that lessons share."""
