// A driver library with just enough in it to be asked what there is. FAKE_VERSION, FAKE_DEVICES and FAKE_CAPABILITY (75 for 7.5) say what
// it answers. Compiled by driver.rs; with -DWITHOUT_NAMES it lacks a function that the program needs.
#include <stdlib.h>
#include <string.h>

static int number(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) {
    (void)flags;
    return number("FAKE_DEVICES", 1) < 0 ? 100 : 0;  // CUDA_ERROR_NO_DEVICE
}
int cuDriverGetVersion(int* version) {
    *version = number("FAKE_VERSION", 12040);
    return 0;
}
int cuDeviceGetCount(int* count) {
    *count = number("FAKE_DEVICES", 1);
    return 0;
}
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}
#ifndef WITHOUT_NAMES
int cuDeviceGetName(char* name, int bytes, int device) {
    (void)device;
    strncpy(name, "Test Driver's GPU", (size_t)bytes);
    return 0;
}
#endif
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    (void)device;
    const int capability = number("FAKE_CAPABILITY", 86);
    switch (attribute) {
        case 75: *value = capability / 10; break;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        case 76: *value = capability % 10; break;  // .._MINOR
        case 16: *value = 80; break;               // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        default: *value = 6 << 20;
    }
    return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    (void)device;
    *bytes = (size_t)24 << 30;
    return 0;
}
int cuGetErrorString(int error, const char** text) {
    (void)error;
    *text = "an error of the test driver";
    return 0;
}
