#include "registry.h"

#include <stdio.h>
#include <string.h>

/* Backends by what they serve; a GPU library adds itself here once there is one. */
static const Backend *backend_for(Device device)
{
    const Backend *cpu = cpu_backend();
    return cpu->device_type == device.type ? cpu : NULL;
}

static int kernel_runs(const Kernel *kernel, uint64_t features, const void *args)
{
    return (kernel->needs & ~features) == 0 && (!kernel->fits || kernel->fits(args));
}

static Status variant_fail(const KernelTable *table, uint64_t features, const char *op,
                           const char *variant, const void *args, Error *err)
{
    char list[256] = "";
    size_t length = 0;
    for (int i = 0; i < table->count && length < sizeof list; i++)
        if (kernel_runs(&table->rows[i], features, args))
            length += (size_t)snprintf(list + length, sizeof list - length,
                                       length ? ", \"%s\"" : "\"%s\"", table->rows[i].variant);
    if (variant)
        return fail(err, BAD_VALUE, "%s: variant is \"%.40s\"; expected one that runs here: %s", op,
                    variant, list);
    return fail(err, BAD_DEVICE, "%s: no kernel runs on this machine", op);
}

Status kernel_find(OpId op, Device device, const char *variant, const void *args,
                   const Kernel **found, Error *err)
{
    static const char *const NAME[] = {
#define OP(op, doc) #op,
#include "formats.h"
    };
    const Backend *backend = backend_for(device);
    if (!backend)
        return fail(
            err, BAD_DEVICE,
            "%s: the tensors are on DLPack device %d:%d; expected cpu, the one backend built",
            NAME[op], device.type, device.id);
    const KernelTable *table = &backend->tables[op];
    uint64_t features = backend->features(device.id);
    for (int i = 0; i < table->count; i++) {
        const Kernel *kernel = &table->rows[i];
        if ((!variant || !strcmp(variant, kernel->variant)) &&
            kernel_runs(kernel, features, args)) {
            *found = kernel;
            return OK;
        }
    }
    return variant_fail(table, features, NAME[op], variant, args, err);
}
