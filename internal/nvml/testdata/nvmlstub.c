// A stand-in for libnvidia-ml.so.1 that plays machines Deepwell has no access to. Tests compile it:
//
//     cc -shared -fPIC -o libnvidia-ml.so.1 nvmlstub.c
//
// The environment variable NVMLSTUB chooses the machine, read when nvmlInit_v2 is called:
//
//     b200       8 B200, 18 NVLinks each to NVSwitches (also when the variable is not set)
//     uneven     the same, but GPU 2's links are down
//     lost       the same, but GPU 5 fell off the bus
//     gb200      4 GB200 of a rack that shares one NVLink domain
//     mig        one H100 cut by MIG into 1g.10gb, 2g.20gb and 3g.40gb
//     rtx        2 RTX PRO 6000 Blackwell, no NVLink
//     old        8 B200 under driver 570.86.15, which is too old for CUDA 13
//     notloaded  nvmlInit_v2 answers 9, driver not loaded
//     mismatch   nvmlInit_v2 answers 18, library and kernel module differ
//
// Compiled with -DNVMLSTUB_BARE it lacks every function that drivers of 2020 lacked.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NOT_LOADED = 9,
       LOST = 15, MISMATCH = 18, BAD_VERSION = 25 };

typedef struct { int index, part; } Device;

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned kind;
    int result;
    union { double d; unsigned u; unsigned long ul; unsigned long long ull; } value;
} Field;

typedef struct {
    const char *name;
    int count, major, minor, links, link_version, link_mbps, power_mw, sm_mhz, memory_mhz, pcie;
    unsigned long long mib, reserved_mib;
} Card;

static const Card b200 = {"NVIDIA B200", 8, 10, 0, 18, 7, 53125, 1000000, 1965, 3996, 5,
                          183359, 716};
static const Card gb200 = {"NVIDIA GB200", 4, 10, 0, 18, 7, 53125, 1200000, 2062, 3996, 5,
                           189471, 740};
static const Card h100 = {"NVIDIA H100 80GB HBM3", 1, 9, 0, 18, 6, 26562, 700000, 1980, 2619, 5,
                          81559, 551};
static const Card rtx = {"NVIDIA RTX PRO 6000 Blackwell Server Edition", 2, 12, 0, 0, 0, 0,
                         600000, 2430, 12481, 5, 97887, 637};

static const Card *card;
static const char *machine = "b200";
static Device devices[8], parts[7];

static const unsigned buses[8] = {0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf};

// The places that hold an instance are not next to each other, as after one was destroyed.
static const struct {
    const char *profile;
    unsigned slices, sms;
    unsigned long long mib;
} mig[7] = {{"1g.10gb", 1, 16, 9984}, {0}, {"2g.20gb", 2, 32, 20096}, {0},
            {"3g.40gb", 3, 60, 40448}, {0}, {0}};

static int is(const char *name) { return strcmp(machine, name) == 0; }

static int gone(Device *d) { return is("lost") && d->index == 5; }

int nvmlInit_v2(void) {
    const char *chosen = getenv("NVMLSTUB");
    machine = chosen && *chosen ? chosen : "b200";
    if (is("notloaded")) return NOT_LOADED;
    if (is("mismatch")) return MISMATCH;
    card = is("gb200") ? &gb200 : is("mig") ? &h100 : is("rtx") ? &rtx : &b200;
    for (int i = 0; i < 8; i++) devices[i] = (Device){i, -1};
    for (int i = 0; i < 7; i++) parts[i] = (Device){0, i};
    return OK;
}

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case INVALID: return "Invalid Argument";
    case UNSUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case NOT_LOADED: return "Driver Not Loaded";
    case LOST: return "GPU is lost";
    case MISMATCH: return "Driver/library version mismatch";
    }
    return "Unknown Error";
}

static int put(char *to, unsigned size, const char *text) {
    if (strlen(text) + 1 > size) return TOO_SMALL;
    strcpy(to, text);
    return OK;
}

int nvmlSystemGetDriverVersion(char *to, unsigned size) {
    return put(to, size, is("old") ? "570.86.15" : "580.95.05");
}

int nvmlSystemGetNVMLVersion(char *to, unsigned size) {
    return put(to, size, is("old") ? "12.570.86.15" : "13.580.95.05");
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = is("old") ? 12080 : 13000;
    return OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = card->count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= (unsigned)card->count) return INVALID;
    *device = &devices[index];
    return gone(*device) ? LOST : OK;
}

int nvmlDeviceGetName(Device *d, char *to, unsigned size) {
    char name[96];
    if (d->part < 0) return put(to, size, card->name);
    snprintf(name, sizeof name, "%s MIG %s", card->name, mig[d->part].profile);
    return put(to, size, name);
}

int nvmlDeviceGetUUID(Device *d, char *to, unsigned size) {
    char uuid[96];
    snprintf(uuid, sizeof uuid, "%s-00000000-0000-4000-8000-0000000000%x%x",
             d->part < 0 ? "GPU" : "MIG", d->index, d->part < 0 ? 0 : d->part);
    return put(to, size, uuid);
}

static void address(Pci *p, unsigned bus) {
    memset(p, 0, sizeof *p);
    p->bus = bus;
    snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", bus);
    snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", bus);
}

int nvmlDeviceGetPciInfo_v3(Device *d, Pci *p) {
    address(p, buses[d->index]);
    return OK;
}

int nvmlDeviceGetMemoryInfo(Device *d, unsigned long long m[3]) {
    m[0] = card->mib << 20;
    m[1] = (card->mib - card->reserved_mib) << 20;
    m[2] = card->reserved_mib << 20;
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
    *major = card->major;
    *minor = card->minor;
    return OK;
}

int nvmlDeviceGetCurrPcieLinkGeneration(Device *d, unsigned *v) { *v = card->pcie; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(Device *d, unsigned *v) { *v = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *d, unsigned *v) { *v = card->pcie; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(Device *d, unsigned *v) { *v = 16; return OK; }
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *v) { *v = card->power_mw; return OK; }
int nvmlDeviceGetPersistenceMode(Device *d, unsigned *v) { *v = 1; return OK; }

int nvmlDeviceGetMaxClockInfo(Device *d, unsigned kind, unsigned *v) {
    if (kind != 1 && kind != 2) return INVALID;
    *v = kind == 1 ? card->sm_mhz : card->memory_mhz;
    return OK;
}

int nvmlDeviceGetEccMode(Device *d, unsigned *now, unsigned *pending) {
    *now = *pending = 1;
    return OK;
}

// The first half of the CPUs belongs to the first half of the cards, as on a host of two sockets.
static int node(Device *d) { return d->index >= (card->count + 1) / 2; }

int nvmlDeviceGetCpuAffinity(Device *d, unsigned words, unsigned long *set) {
    memset(set, 0, words * sizeof *set);
    for (int c = 0; c < 56; c++)
        for (int t = 0; t < 224; t += 112) {
            int cpu = node(d) * 56 + c + t;
            set[cpu / 64] |= 1ul << cpu % 64;
        }
    return OK;
}

int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *active) {
    if (card->links == 0) return UNSUPPORTED;
    if (link >= (unsigned)card->links) return INVALID;
    *active = !(is("uneven") && d->index == 2) && !is("mig");
    return OK;
}

int nvmlDeviceGetNvLinkVersion(Device *d, unsigned link, unsigned *version) {
    *version = card->link_version;
    return OK;
}

// Cards of one socket meet in its root complex, others across the sockets.
int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, int *level) {
    *level = node(a) != node(b) ? 50 : 40;
    return OK;
}

#ifndef NVMLSTUB_BARE

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;

int nvmlDeviceGetMemoryInfo_v2(Device *d, Memory *m) {
    if (m->version != (sizeof *m | 2u << 24)) return BAD_VERSION;
    m->total = card->mib << 20;
    m->reserved = card->reserved_mib << 20;
    m->free = m->total - m->reserved;
    m->used = 0;
    return OK;
}

int nvmlDeviceGetMemoryAffinity(Device *d, unsigned words, unsigned long *set, unsigned scope) {
    if (scope != 0) return INVALID;
    memset(set, 0, words * sizeof *set);
    set[0] = 1ul << node(d);
    return OK;
}

int nvmlDeviceGetMigMode(Device *d, unsigned *now, unsigned *pending) {
    if (is("rtx")) return UNSUPPORTED;
    *now = *pending = is("mig");
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *d, unsigned *count) {
    *count = 7;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **part) {
    if (index >= 7 || !mig[index].profile) return NOT_FOUND;
    *part = &parts[index];
    return OK;
}

typedef struct {
    unsigned sms, copy, decoders, encoders, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long mib;
} Attributes;

int nvmlDeviceGetAttributes_v2(Device *d, Attributes *a) {
    if (d->part < 0) return UNSUPPORTED;
    memset(a, 0, sizeof *a);
    a->sms = mig[d->part].sms;
    a->gpu_slices = a->compute_slices = mig[d->part].slices;
    a->mib = mig[d->part].mib;
    return OK;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device *d, unsigned link, int *kind) {
    *kind = 2;
    return OK;
}

// Switches of NVLink 5 are no PCI devices, so the address is hidden.
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *d, unsigned link, Pci *p) {
    memset(p, 0, sizeof *p);
    strcpy(p->bus_id, "00000000:00:00.0");
    return OK;
}

int nvmlDeviceGetFieldValues(Device *d, int count, Field *f) {
    for (int i = 0; i < count; i++) {
        f[i].result = OK;
        f[i].kind = 1;
        if (f[i].field == 91 && card->links) f[i].value.u = card->links;
        else if (f[i].field == 164 && card->links) f[i].value.u = card->link_mbps;
        else f[i].result = UNSUPPORTED;
    }
    return OK;
}

int nvmlDeviceGetP2PStatus(Device *a, Device *b, unsigned index, int *status) {
    int down = is("uneven") && (a->index == 2 || b->index == 2);
    *status = index == 2 && card->links && !is("mig") && !down ? 0 : 5;
    return OK;
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned health;
} Fabric;

int nvmlDeviceGetGpuFabricInfoV(Device *d, Fabric *f) {
    if (f->version != (sizeof *f | 2u << 24)) return BAD_VERSION;
    f->status = OK;
    f->clique = is("gb200") ? 3 : 0;
    f->state = card->links && !is("mig") ? 3 : 0;
    memset(f->cluster, is("gb200") ? 0xab : 0, sizeof f->cluster);
    return OK;
}

#endif
