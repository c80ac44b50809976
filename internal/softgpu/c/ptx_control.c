// Branches, barriers, and what needs no action when blocks run to their end one after another.
#include "ptx_impl.h"

static void trap(struct warp *w, const struct ins *i) { ptx_fail(w, i, "the kernel stops itself"); }

static const char *prepare_arrive(struct ins *i) {
    i->flags |= FLAG_ARRIVE;
    return NULL;
}

// `bar` is short for `barrier` with .aligned.
static const char *prepare_barrier(struct ins *i) {
    if (!strncmp(i->spelling, "bar.", 4) || strstr(i->spelling, ".aligned"))
        i->flags |= FLAG_ALIGNED;
    return NULL;
}

const struct row ptx_control_rows[] = {
    {"bra{.uni}", "l", NULL, KIND_BRANCH},
    {"ret{.uni}", "", NULL, KIND_EXIT},
    {"exit", "", NULL, KIND_EXIT},
    {"trap", "", trap, KIND_MASKED},
    {"bar{.cta}.sync", "4 44", NULL, KIND_BARRIER, prepare_barrier},
    {"barrier{.cta}.sync{.aligned}", "4 44", NULL, KIND_BARRIER, prepare_barrier},
    {"bar{.cta}.arrive", "44", NULL, KIND_BARRIER, prepare_arrive},
    {"barrier{.cta}.arrive{.aligned}", "44", NULL, KIND_BARRIER, prepare_arrive},
    {"bar{.cta}.red.popc.u32", "d4n d44n", NULL, KIND_BARRIER, prepare_barrier},
    {"bar{.cta}.red(.and|.or).pred", "P4n P44n", NULL, KIND_BARRIER, prepare_barrier},
    {"barrier{.cta}.red.popc{.aligned}.u32", "d4n d44n", NULL, KIND_BARRIER, prepare_barrier},
    {"barrier{.cta}.red(.and|.or){.aligned}.pred", "P4n P44n", NULL, KIND_BARRIER, prepare_barrier},
    {"membar(.cta|.gl|.sys)", "", NULL, KIND_NOP},
    {"fence{.sc|.acq_rel|.acquire|.release}(.cta|.cluster|.gpu|.sys)", "", NULL, KIND_NOP},
    {"griddepcontrol(.wait|.launch_dependents)", "", NULL, KIND_NOP},
    {"nanosleep.u32", "4", NULL, KIND_NOP},
    {0}};
