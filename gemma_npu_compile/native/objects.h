// Questions about Python's objects. The library links against neither Python nor torch: objects.py hands their functions
// over. Who calls holds the interpreter's lock.
#pragma once

#include "numbers.h"

namespace {

struct Python {
    void* (*item)(void* list, int64_t index);                              // PyList_GetItem
    int (*next)(void* dict, int64_t* position, void** key, void** value);  // PyDict_Next
    void* (*address)(void* tensor);                                        // torch's data_ptr(), which may throw
} python;

}  // namespace

extern "C" void gemma_npu_python(void* item, void* next, void* address) {
    python = {(decltype(python.item))item, (decltype(python.next))next, (decltype(python.address))address};
}

// Whether the tensors at some places of a list lie at these addresses; -1 where one is no tensor or has no memory.
extern "C" int64_t gemma_npu_lie_at(void* list, const Word* places, const Word* addresses, int64_t count) {
    try {
        for (int64_t i = 0; i < count; i++) {
            void* tensor = python.item(list, places[i]);
            if (!tensor) return -1;
            if (Word(python.address(tensor)) != addresses[i]) return 0;
        }
    } catch (...) {
        return -1;
    }
    return 1;
}

// Whether the values of some dicts, one after the other, are these objects.
extern "C" int64_t gemma_npu_hold(void* const* dicts, int64_t count, void* const* objects, int64_t many) {
    int64_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t position = 0;
        void* value;
        while (python.next(dicts[i], &position, nullptr, &value))
            if (seen == many || objects[seen++] != value) return 0;
    }
    return seen == many;
}
