/* How a function says that it failed: a Status, and the reason in an Error that the caller owns. */
#ifndef STATUS_H
#define STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
#define STATUS(id, exception) id,
#include "status.def"
#undef STATUS
} Status;

typedef struct {
    Status status;
    char text[1024];
} Error;

/* Writes the text (cut at the buffer's end), stores and returns the status, so `return fail(...)` is one line. */
/* clang-format off */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
Status fail(Error *err, Status status, const char *format, ...);
/* clang-format on */

#ifdef __cplusplus
}
#endif
#endif
