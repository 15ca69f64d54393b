/* The rows of the Hopper forward: which shape serves which head size, and when keys are taken in parts. */
#include "forward_sm90.cuh"

/* The shapes are those that bench/tune_sm90.py found best: its tables are in docs/tuning.md, section 3. Four warpgroups in
 * turn hide each other's latencies best, where the registers suffice: short sequences are made of little else. Where there
 * are many rows and keys, three with S and O += P V together are ahead, and read K and V less often. The softcap wants
 * registers too, so there are fewer keys at once. A rule must not look at what else is in a batch, nor at the device: the
 * rounding of a result must not depend on them. */
template <class T> static heed_status run(const args &a, const key_parts &by, int units, const heed_exec *x)
{
    const int width = HEED_MAX(a.D, a.Dv);
    const int64_t keys = a.offsets_k ? -1 : tiles_of(a.Sk, a.col_step); /* -1: who knows */
    const bool brief = keys >= 0 && keys <= 1024;
    const bool many = a.Sq > 1536 && a.left >= FAR && by.count == 1; /* rows, with all keys or all before them */
    heed_status (*launch)(const args &, const key_parts &, int, const heed_exec *);
    if (a.softcap > 0)
        launch = width <= 64    ? forward_sm90_launch<T, forward_shape<64, 4, 64, 8, false, true>>
                 : width <= 96  ? forward_sm90_launch<T, forward_shape<96, 4, 64, 2, false, true>>
                 : width <= 128 ? forward_sm90_launch<T, forward_shape<128, 2, 112, 2, true, true>>
                 : width <= 192 ? forward_sm90_launch<T, forward_shape<192, 2, 96, 2, true, true>>
                                : forward_sm90_launch<T, forward_shape<256, 2, 48, 2, true, true>>;
    else
        launch = width <= 64 && many && keys > 4096    ? forward_sm90_launch<T, forward_shape<64, 3, 128, 4, true>>
                 : width <= 64                         ? forward_sm90_launch<T, forward_shape<64, 4, 64, 8, false>>
                 : width <= 96 && brief                ? forward_sm90_launch<T, forward_shape<96, 4, 64, 2, false>>
                 : width <= 96                         ? forward_sm90_launch<T, forward_shape<96, 3, 96, 2, true>>
                 : width <= 128 && many && keys > 1000 ? forward_sm90_launch<T, forward_shape<128, 3, 64, 2, true>>
                 : width <= 128                        ? forward_sm90_launch<T, forward_shape<128, 2, 128, 2, true>>
                 : width <= 192                        ? forward_sm90_launch<T, forward_shape<192, 2, 64, 2, true>>
                                                       : forward_sm90_launch<T, forward_shape<256, 2, 64, 2, true>>;
    return launch(a, by, units, x);
}

/* Few rows and many keys are taken in parts, so that a small batch fills the device. Parts are whole blocks of 64 and 128
 * keys; the more rows, the more a part costs, and the longer it is. */
static key_parts parts_of(const heed_problem *p)
{
    const int64_t keys = p->full.keys;
    const int64_t part = p->Sq <= 16 ? 1024 : p->Sq <= 64 ? 2048 : 8192;
    if (p->Sq > 1024 || keys < HEED_MAX(2 * part, 3072) || p->a.offsets_q || p->a.offsets_k)
        return { 1, INT32_MAX, NULL, NULL };
    return { (int)tiles_of(keys, part), (int)part, NULL, NULL };
}

static int64_t part_rows(const heed_problem *p) { return p->B * p->Hq * p->Sq; }

size_t heed_forward_workspace_sm90(const heed_problem *p, const heed_plan *plan)
{
    (void)plan;
    const int parts = parts_of(p).count;
    return parts > 1 ? (size_t)(parts * part_rows(p) * (p->Dv + 1)) * sizeof(float) : 0;
}

heed_status heed_forward_sm90(const heed_problem *p, const heed_plan *plan, const heed_exec *x)
{
    prologue begin(p, x);
    if (begin.status)
        return begin.status;
    const args &a = begin.a;
    const int units = plan->device.units;
    key_parts by = parts_of(p);
    if (by.count > 1) {
        by.o = (float *)x->workspace;
        by.lse = by.o + by.count * part_rows(p) * a.Dv;
    }
    heed_status status = a.q.dtype == HEED_F16 ? run<__half>(a, by, units, x) : run<__nv_bfloat16>(a, by, units, x);
    return status || by.count == 1 ? status : heed_cuda_merge_parts(a, by.count, by.o, by.lse, plan, x);
}
