/* Extents and shapes as the rows write them: `N+1`, `K/8`, `* D`, `N R?`. */
#ifndef EXTENT_H
#define EXTENT_H

#include "spec.h"

/* Reads one extent up to a blank or the end; *text moves behind it. 0 when it cannot be read or names no dim. */
int extent_read(const Spec *spec, const char **text, Extent *e);

/* Reads a whole shape. 0 when it cannot be read. */
int shape_read(const Spec *spec, const char *text, Shape *shape);

/* The value with these dims (-1: not known yet). 0 when a name in it is not known or the value overflows. */
int extent_value(const Extent *e, const int64_t *dim, int64_t *value);

/* Whether the extent fixes its name: it is bare or has one +n, -n or *n step. */
int extent_fixes(const Extent *e);

/* The name's value that makes the extent `value`; 0 when there is none. */
int extent_solve(const Extent *e, int64_t value, int64_t *dim);

#endif
