"""Training objectives on samples: masked tokens, span corruption, pairs, choices, masks of packed documents."""
