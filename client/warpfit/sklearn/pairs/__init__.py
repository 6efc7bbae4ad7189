"""All pairs: the best products and sums of two formulas from a library, by matrix products.

With values U [p, rows] and V [m, rows], the errors of the best a + b u v + c u of all p x m pairs
take four matrix products, and those of the best a + b u + c v take one, so a second of one core
weighs tens of millions of formulas; V also holds the reciprocals of the library. The same is done
for all views of the target, and beside the best formulas of a view (matching pursuit). What is best
in a round joins the library of the next (a beam search).
"""
