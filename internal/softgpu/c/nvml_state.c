// What NVML tells of a GPU beside its links: where it is, its memory, modes, clocks and neighbours.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "nvml.h"

// nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3.
struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char name[32];
};

static int place(struct pci *p, unsigned bus) {
  memset(p, 0, sizeof *p);
  p->bus = bus;
  snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", bus);
  snprintf(p->name, sizeof p->name, "00000000:%02X:00.0", bus);
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetPciInfo_v3(handle h, struct pci *p) {
  return place(p, SG_FIRST_BUS + (unsigned)ordinal(h));
}

// ---- memory

struct memory1 {
  uint64_t total, free, used;
};

struct memory2 {
  unsigned version;
  uint64_t total, reserved, free, used;
};

SG_EXPORT int nvmlDeviceGetMemoryInfo(handle h, struct memory1 *m) {
  (void)h;
  m->total = m->free = sg_memory();
  m->used = 0;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetMemoryInfo_v2(handle h, struct memory2 *m) {
  (void)h;
  if (m->version != (sizeof *m | 2 << 24)) return NVML_INVALID_ARGUMENT;
  m->total = m->free = sg_memory();
  m->reserved = m->used = 0;
  return NVML_SUCCESS;
}

// ---- modes and clocks

SG_EXPORT int nvmlDeviceGetEccMode(handle h, unsigned *now, unsigned *pending) {
  (void)h;
  *now = *pending = 1;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetPersistenceMode(handle h, unsigned *mode) {
  (void)h;
  *mode = 1;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetMigMode(handle h, unsigned *now, unsigned *pending) {
  (void)h;
  *now = *pending = 0;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetMaxMigDeviceCount(handle h, unsigned *count) {
  (void)h;
  *count = 0;
  return NVML_SUCCESS;
}

// setting is the number behind GPU: in a variable "GPU:NUMBER", if it is this GPU's.
static long long setting(handle h, const char *name, long long fallback) {
  const char *text = getenv(name), *colon = text ? strchr(text, ':') : NULL;
  return colon && atoi(text) == ordinal(h) ? strtoll(colon + 1, NULL, 0) : fallback;
}

SG_EXPORT int nvmlDeviceGetClockInfo(handle h, int which, unsigned *mhz) {
  if (which != 1 && which != 2) return NVML_NOT_SUPPORTED;
  *mhz = (unsigned)(which == 1 ? sg_model()->clock : sg_model()->memory_clock) / 1000;
  if (which == 1) *mhz = (unsigned)setting(h, "SOFTGPU_CLOCK", *mhz);
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(handle h, unsigned long long *reasons) {
  *reasons = (unsigned long long)setting(h, "SOFTGPU_THROTTLE", 0);
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetTemperature(handle h, int sensor, unsigned *celsius) {
  (void)h;
  if (sensor != 0) return NVML_INVALID_ARGUMENT;
  *celsius = 40;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetTotalEccErrors(handle h, int type, int counter,
                                          unsigned long long *count) {
  if (counter != 0) return NVML_NOT_SUPPORTED;
  *count = type == 1 ? (unsigned long long)setting(h, "SOFTGPU_ECC", 0) : 0;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetRemappedRows(handle h, unsigned *corrected, unsigned *uncorrected,
                                        unsigned *pending, unsigned *failed) {
  (void)h;
  *corrected = *uncorrected = *pending = *failed = 0;
  return NVML_SUCCESS;
}

// ---- events: one Xid, of the GPU and with the number that SOFTGPU_XID_EVENT says

struct event {
  handle device;
  unsigned long long type, data;
  unsigned instance, compute;
};

static int told;

SG_EXPORT int nvmlEventSetCreate(void **set) {
  *set = &told;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceRegisterEvents(handle h, unsigned long long types, void *set) {
  (void)h;
  (void)set;
  return types == 8 ? NVML_SUCCESS : NVML_NOT_SUPPORTED;
}

SG_EXPORT int nvmlEventSetWait_v2(void *set, struct event *e, unsigned milliseconds) {
  (void)set;
  (void)milliseconds;
  const char *text = getenv("SOFTGPU_XID_EVENT"), *colon = text ? strchr(text, ':') : NULL;
  if (!colon || told) return 10;  // NVML_ERROR_TIMEOUT
  told = 1;
  *e = (struct event){(handle)(intptr_t)(atoi(text) + 1), 8, (unsigned long long)atoi(colon + 1)};
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlEventSetFree(void *set) {
  (void)set;
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetEnforcedPowerLimit(handle h, unsigned *milliwatts) {
  (void)h;
  (void)milliwatts;
  return NVML_NOT_SUPPORTED;
}

SG_EXPORT int nvmlDeviceGetMaxClockInfo(handle h, int which, unsigned *mhz) {
  (void)h;
  if (which != 1 && which != 2) return NVML_NOT_SUPPORTED;  // SM and memory
  *mhz = (unsigned)(which == 1 ? sg_model()->clock : sg_model()->memory_clock) / 1000;
  return NVML_SUCCESS;
}

// A software GPU is near no processor: its memory is the host's.
SG_EXPORT int nvmlDeviceGetCpuAffinity(handle h, unsigned words, unsigned long *set) {
  (void)h;
  (void)words;
  (void)set;
  return NVML_NOT_SUPPORTED;
}

SG_EXPORT int nvmlDeviceGetMemoryAffinity(handle h, unsigned words, unsigned long *set, int scope) {
  (void)h;
  (void)words;
  (void)set;
  (void)scope;
  return NVML_NOT_SUPPORTED;
}

// ---- links and neighbours

SG_EXPORT int nvmlDeviceGetNvLinkVersion(handle h, unsigned link, unsigned *version) {
  (void)h;
  if ((int)link >= sg_model()->links) return NVML_INVALID_ARGUMENT;
  *version = 7;  // the fifth generation, as nvml.h numbers releases
  return NVML_SUCCESS;
}

// Links lead to a switch, whose address NVML gives as that of a bridge.
SG_EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(handle h, unsigned link, struct pci *p) {
  (void)h;
  if ((int)link >= sg_model()->links) return NVML_INVALID_ARGUMENT;
  return place(p, 0x80);
}

SG_EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(handle h, unsigned link, int *kind) {
  (void)h;
  if ((int)link >= sg_model()->links) return NVML_INVALID_ARGUMENT;
  *kind = 2;  // NVML_NVLINK_DEVICE_TYPE_SWITCH
  return NVML_SUCCESS;
}

// nvmlFieldValue_t. The fields are the number of links and their rate in MB/s.
struct field {
  unsigned field, scope;
  int64_t timestamp, latency;
  int kind, result;
  uint64_t value;
};

SG_EXPORT int nvmlDeviceGetFieldValues(handle h, int count, struct field *list) {
  (void)h;
  for (int i = 0; i < count; i++) {
    struct field *f = &list[i];
    f->kind = 1;  // NVML_VALUE_TYPE_UNSIGNED_INT
    f->result = NVML_SUCCESS;
    if (f->field == 91) {
      f->value = (uint64_t)sg_model()->links;
    } else if ((f->field == 164 || f->field == 90) && sg_model()->links > 0) {
      f->value = 53125;  // NVLink 5, in one direction
    } else {
      f->result = NVML_NOT_SUPPORTED;
    }
  }
  return NVML_SUCCESS;
}

SG_EXPORT int nvmlDeviceGetTopologyCommonAncestor(handle a, handle b, int *level) {
  *level = a == b ? 0 : 40;  // NVML_TOPOLOGY_NODE
  return NVML_SUCCESS;
}
