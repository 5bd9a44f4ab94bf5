#include "status.h"

#include <stdarg.h>
#include <stdio.h>

Status fail(Error *err, Status status, const char *format, ...)
{
    va_list words;
    va_start(words, format);
    vsnprintf(err->text, sizeof err->text, format, words);
    va_end(words);
    return err->status = status;
}
