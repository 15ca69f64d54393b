/* Problems and their memory, and how to run them; compare.c judges the results. harness.h says what is what. */
#include "harness.h"

#if defined(__SANITIZE_ADDRESS__)
#define POISON(p, n) __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define POISON(p, n) __asan_poison_memory_region(p, n)
#define UNPOISON(p, n) __asan_unpoison_memory_region(p, n)
#endif
#endif
#ifdef POISON
void __asan_poison_memory_region(void const volatile *p, size_t n);
void __asan_unpoison_memory_region(void const volatile *p, size_t n);
#else
#define POISON(p, n) (void)0
#define UNPOISON(p, n) (void)0
#endif

#define GUARD 128
#define UNWRITTEN 0xFF

const test_layout BSHD = { .order = { 0, 2, 1, 3 } };

/* ---- Random numbers --------------------------------------------------------------------------------------------- */

static uint64_t random_state, last_seed;

uint64_t test_seed(void)
{
    const char *text = getenv("HEED_TEST_SEED");
    return text && *text ? strtoull(text, NULL, 0) : 1;
}

void print_seed(void)
{
    printf("HEED_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    seed_random(test_seed());
}

void seed_random(uint64_t seed)
{
    last_seed = seed;
    random_state = seed * 0x9E3779B97F4A7C15u;
}

uint64_t random_bits(void) /* splitmix64 */
{
    uint64_t z = (random_state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

int64_t random_int(int64_t least, int64_t most)
{
    return least + (int64_t)(random_bits() % (uint64_t)(most - least + 1));
}

int one_in(int64_t n) { return random_int(1, n) == 1; }

double random_normal(void)
{
    double u = ((double)(random_bits() >> 11) + 1) * 0x1p-53, v = (double)(random_bits() >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* ---- Kernels ---------------------------------------------------------------------------------------------------- */

static int kernel_index(const char *name)
{
    heed_kernel_info info;
    for (int index = 0; heed_kernel_at(index, &info) == HEED_OK; index++)
        if (strcmp(info.name, name) == 0)
            return index;
    return -1;
}

/* A filter that no row has in its name is a mistake: all tests would pass. */
static const char *filter_of_names(void)
{
    const char *filter = getenv("HEED_TEST_KERNEL");
    heed_kernel_info info;
    if (!filter)
        return NULL;
    for (int index = 0; heed_kernel_at(index, &info) == HEED_OK; index++)
        if (strstr(info.name, filter))
            return filter;
    fail_msg("HEED_TEST_KERNEL is %s, which no kernel has in its name", filter);
    return NULL;
}

heed_kernel_info next_kernel(int pass, const char *after)
{
    static uint64_t state_of_loop;
    const char *filter = filter_of_names();
    heed_kernel_info info;
    if (!after) {
        state_of_loop = random_state;
        forget_answers();
    }
    for (int index = after ? kernel_index(after) + 1 : 0; heed_kernel_at(index, &info) == HEED_OK; index++)
        if (info.runs_here && (pass == EITHER_PASS || info.backward == pass) &&
            (!filter || strstr(info.name, filter))) {
            random_state = state_of_loop;
            return info;
        }
    return (heed_kernel_info){ 0 };
}

int keeps_order(const heed_kernel_info *kernel)
{
    for (int i = 0; i < heed_kernel_total; i++)
        if (!strcmp(heed_kernels[i].name, kernel->name))
            return kernel->backward == 0 || (heed_kernels[i].uses & HEED_USES_ORDER) != 0;
    return 1;
}

/* Whether a row, named without its pass, is of another's type and family, or of the family that the other's extends:
 * _cuda_sm90_f16 serves _cuda_sm90fused_f16. */
static int serves(const char *row, const char *other)
{
    const char *type = strrchr(row, '_'), *other_type = strrchr(other, '_');
    return strcmp(type, other_type) == 0 && strncmp(row, other, (size_t)(type - row)) == 0;
}

/* The row of the same family for this pass, NULL where there is none, or no name: then the planner chooses. */
static const char *kernel_for(const test_case *c, heed_pass pass)
{
    static const char *const prefix[] = { "forward", "backward" };
    const char *found = NULL;
    heed_kernel_info info;
    if (c->kernel.backward == (int)pass || !c->kernel.name)
        return c->kernel.name;
    const char *family = c->kernel.name + strlen(prefix[c->kernel.backward]);
    for (int index = 0; heed_kernel_at(index, &info) == HEED_OK; index++)
        if (info.backward == (int)pass && serves(info.name + strlen(prefix[pass]), family) &&
            (!found || strlen(info.name) > strlen(found)))
            found = info.name;
    return found;
}

/* ---- Memory ----------------------------------------------------------------------------------------------------- */

static test_buffer buffer_new(size_t bytes, size_t offset)
{
    test_buffer b = { .bytes = bytes, .block_bytes = bytes + offset + 2 * GUARD };
    b.block_bytes = (b.block_bytes + 63) / 64 * 64;
    b.block = block_new(b.block_bytes);
    assert_non_null(b.block);
    memset(b.block, UNWRITTEN, b.block_bytes);
    b.data = b.block + GUARD + offset;
    POISON(b.block, GUARD + offset);
    POISON(b.data + bytes, b.block_bytes - GUARD - offset - bytes);
    return b;
}

static void buffer_free(test_buffer *b)
{
    UNPOISON(b->block, b->block_bytes);
    block_free(b->block, b->block_bytes);
}

static int all_unwritten(const unsigned char *bytes, size_t count)
{
    for (size_t n = 0; n < count; n++)
        if (bytes[n] != UNWRITTEN)
            return 0;
    return 1;
}

static int guards_intact(const test_buffer *b)
{
    size_t before = (size_t)(b->data - b->block), after = b->block_bytes - before - b->bytes;
    UNPOISON(b->block, b->block_bytes);
    int intact = all_unwritten(b->block, before) && all_unwritten(b->data + b->bytes, after);
    POISON(b->block, before);
    POISON(b->data + b->bytes, after);
    return intact;
}

/* What remains of a strided buffer once its elements are taken out is as unwritten as it began. */
static int gaps_intact(const test_buffer *b)
{
    const heed_tensor *t = &b->view;
    if (!t->data || (size_t)elements(t) * heed_dtype_size(t->dtype) == b->bytes)
        return 1;
    unsigned char *copy = malloc(b->bytes);
    memcpy(copy, b->data, b->bytes);
    heed_tensor view = *t;
    view.data = copy + ((unsigned char *)t->data - b->data);
    fill_bytes(&view, UNWRITTEN);
    int intact = all_unwritten(copy, b->bytes);
    free(copy);
    return intact;
}

static test_buffer *keep(test_case *c, test_buffer b)
{
    assert_true(c->buffer_count < COUNT(c->buffers));
    c->buffers[c->buffer_count] = b;
    return &c->buffers[c->buffer_count++];
}

void *case_memory(test_case *c, size_t bytes, size_t offset) { return keep(c, buffer_new(bytes, offset))->data; }

heed_tensor case_tensor(test_case *c, heed_dtype dtype, const int64_t shape[4], const test_layout *layout)
{
    static const test_layout packed = { 0 };
    static const int natural[4] = { 0, 1, 2, 3 };
    const test_layout *l = layout ? layout : &packed;
    const int *order = l->order[0] | l->order[1] | l->order[2] | l->order[3] ? l->order : natural;
    heed_tensor t = { .dtype = dtype };
    int64_t extent = 1, first = 0, last = 0;
    for (int n = 3; n >= 0; n--) {
        int d = order[n];
        t.shape[d] = shape[d];
        t.stride[d] = extent + l->gap[d];
        extent = t.stride[d] * HEED_MAX(shape[d], 1);
        last += t.stride[d] * (HEED_MAX(shape[d], 1) - 1);
        if (l->flip[d]) {
            first += t.stride[d] * (HEED_MAX(shape[d], 1) - 1);
            t.stride[d] = -t.stride[d];
        }
    }
    size_t size = heed_dtype_size(dtype), bytes = elements(&t) ? (size_t)(last + 1) * size : 0;
    test_buffer *b = keep(c, buffer_new(bytes, (size_t)l->offset * size));
    t.data = b->data + (size_t)(bytes ? first : 0) * size;
    if (memcmp(l, &packed, sizeof packed) == 0)
        memset(t.stride, 0, sizeof t.stride);
    b->view = t;
    return t;
}

const int32_t *case_int32s(test_case *c, const int32_t *values, int64_t count)
{
    int32_t *copy = case_memory(c, (size_t)count * sizeof *copy, 0);
    memcpy(copy, values, (size_t)count * sizeof *copy);
    return copy;
}

void free_since(test_case *c, int count)
{
    while (c->buffer_count > count)
        buffer_free(&c->buffers[--c->buffer_count]);
}

void case_free(test_case *c) { free_since(c, 0); }

/* ---- Elements --------------------------------------------------------------------------------------------------- */

int64_t element(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c)
{
    const int64_t *shape = t->shape, *stride = t->stride;
    b = shape[0] == 1 ? 0 : b, h = shape[1] == 1 ? 0 : h, i = shape[2] == 1 ? 0 : i, c = shape[3] == 1 ? 0 : c;
    if (!stride[0] && !stride[1] && !stride[2] && !stride[3])
        return ((b * shape[1] + h) * shape[2] + i) * shape[3] + c;
    return b * stride[0] + h * stride[1] + i * stride[2] + c * stride[3];
}

double get(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c)
{
    return heed_load(t->data, t->dtype, element(t, b, h, i, c));
}

void set(const heed_tensor *t, int64_t b, int64_t h, int64_t i, int64_t c, double x)
{
    heed_store(t->data, t->dtype, element(t, b, h, i, c), x);
}

int64_t elements(const heed_tensor *t) { return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3]; }

int64_t nth(const heed_tensor *t, int64_t n)
{
    const int64_t *s = t->shape;
    return element(t, n / s[3] / s[2] / s[1], n / s[3] / s[2] % s[1], n / s[3] % s[2], n % s[3]);
}

double *unpack(test_case *c, const heed_tensor *t)
{
    if (!t->data)
        return NULL;
    double *values = case_memory(c, (size_t)elements(t) * sizeof *values, 0);
    for (int64_t n = 0; n < elements(t); n++)
        values[n] = heed_load(t->data, t->dtype, nth(t, n));
    return values;
}

void fill_normal(const heed_tensor *t, double sigma)
{
    for (int64_t n = 0; n < elements(t); n++)
        heed_store(t->data, t->dtype, nth(t, n), sigma * random_normal());
}

void fill_row(const heed_tensor *t, int64_t b, int64_t h, int64_t i, double x)
{
    for (int64_t n = 0; n < t->shape[3]; n++)
        set(t, b, h, i, n, x);
}

void fill_bytes(const heed_tensor *t, int byte)
{
    size_t size = heed_dtype_size(t->dtype);
    for (int64_t n = 0; n < elements(t); n++)
        memset((char *)t->data + nth(t, n) * (int64_t)size, byte, size);
}

heed_tensor slice(heed_tensor t, int dimension, int64_t first, int64_t step, int64_t count)
{
    if (!t.stride[0] && !t.stride[1] && !t.stride[2] && !t.stride[3])
        for (int64_t d = 3, extent = 1; d >= 0; extent *= t.shape[d--])
            t.stride[d] = extent;
    t.data = (char *)t.data + first * t.stride[dimension] * (int64_t)heed_dtype_size(t.dtype);
    t.stride[dimension] *= step;
    t.shape[dimension] = count;
    return t;
}

/* ---- Cases ------------------------------------------------------------------------------------------------------ */

static int64_t size_of(int64_t n, int64_t missing) { return n == EMPTY ? 0 : n ? n : missing; }

static heed_tensor new_tensor(test_case *c, heed_dtype dtype, int64_t B, int64_t H, int64_t S, int64_t D,
                              const test_layout *layout)
{
    const int64_t shape[4] = { B, H, S, D };
    return case_tensor(c, dtype, shape, layout);
}

/* lengths[B], or B times whole, as offsets[B+1]. */
static const int32_t *offsets_of(test_case *c, int64_t B, const int32_t *lengths, int64_t whole, int64_t *longest)
{
    int32_t *offsets = case_memory(c, (size_t)(B + 1) * sizeof *offsets, 0);
    offsets[0] = 0;
    *longest = 0;
    for (int64_t b = 0; b < B; b++) {
        int32_t length = lengths ? lengths[b] : (int32_t)whole;
        offsets[b + 1] = offsets[b] + length;
        *longest = HEED_MAX(*longest, length);
    }
    return offsets;
}

/* A cache with some pages more than needed, handed out in random order; those in no table stay NaN. */
static void new_pages(test_case *c, int64_t B, int64_t Sk, int64_t page, const int32_t *keys_of, int64_t *pages)
{
    int64_t columns = (Sk + page - 1) / page;
    *pages = B * columns + 3;
    int32_t *table = case_memory(c, (size_t)(B * columns) * sizeof *table, 0);
    int32_t *lengths = case_memory(c, (size_t)B * sizeof *lengths, 0);
    int32_t *all = malloc((size_t)*pages * sizeof *all);
    for (int64_t n = 0; n < *pages; n++)
        all[n] = (int32_t)n;
    for (int64_t n = 0; n < B * columns; n++) {
        int64_t other = random_int(n, *pages - 1);
        int32_t taken = all[other];
        all[other] = all[n];
        table[n] = all[n] = taken;
    }
    free(all);
    for (int64_t b = 0; b < B; b++)
        lengths[b] = keys_of ? keys_of[b] : (int32_t)Sk;
    c->a.lengths_k = lengths;
    c->a.block_table = table;
    c->a.block_table_stride = c->a.block_table_columns = columns;
}

static void poison_padding(test_case *c)
{
    const heed_attention *a = &c->a;
    for (int64_t b = 0; b < case_sequences(c); b++)
        for (int64_t h = 0; h < a->q.shape[1]; h++) {
            for (int64_t i = a->lengths_q ? a->lengths_q[b] : a->q.shape[2]; i < a->q.shape[2]; i++) {
                fill_row(&a->q, b, h, i, NAN);
                fill_row(&c->g.d_o, b, h, i, NAN);
            }
            if (h >= a->k.shape[1] || a->offsets_k || !a->lengths_k)
                continue;
            int64_t page = a->k.shape[2], keys = case_keys(c);
            for (int64_t j = a->lengths_k[b]; j < keys; j++) {
                int64_t batch = a->block_table ? a->block_table[b * a->block_table_stride + j / page] : b;
                fill_row(&a->k, batch, h, a->block_table ? j % page : j, NAN);
                fill_row(&a->v, batch, h, a->block_table ? j % page : j, NAN);
            }
        }
}

test_case case_new(const heed_kernel_info *kernel, case_shape s)
{
    test_case c = { .kernel = *kernel, .x = { .backend = kernel->backend } };
    heed_dtype dtype = kernel->dtype, result = s.fp32_results && dtype != HEED_F64 ? HEED_F32 : dtype,
               gradient = s.fp32_gradients && dtype != HEED_F64 ? HEED_F32 : result;
    int64_t B = size_of(s.B, 1), Hq = size_of(s.Hq, 1), Hk = size_of(s.Hk, Hq), Sq = size_of(s.Sq, 1);
    int64_t Sk = s.Sk ? size_of(s.Sk, 0) : Sq, D = s.D ? s.D : 1, Dv = s.Dv ? s.Dv : D;
    int64_t q_batch = B, k_batch = B, rows = Sq, keys = Sk;
    if (s.form == RAGGED) {
        c.a.sequences = B;
        c.a.offsets_q = offsets_of(&c, B, s.rows_of, Sq, &c.a.max_rows);
        c.a.offsets_k = offsets_of(&c, B, s.keys_of, Sk, &c.a.max_keys);
        q_batch = k_batch = 1;
        rows = c.a.offsets_q[B];
        keys = c.a.offsets_k[B];
    } else if (s.rows_of)
        c.a.lengths_q = case_int32s(&c, s.rows_of, B);
    if (s.form == PADDED && s.keys_of)
        c.a.lengths_k = case_int32s(&c, s.keys_of, B);
    if (s.form == PAGED) {
        int64_t page = s.page ? s.page : 16;
        new_pages(&c, B, Sk, page, s.keys_of, &k_batch);
        keys = page;
    }
    const test_layout *l = &s.layout;
    c.a.q = new_tensor(&c, dtype, q_batch, Hq, rows, D, l);
    c.a.k = new_tensor(&c, dtype, k_batch, Hk, keys, D, l);
    c.a.v = new_tensor(&c, dtype, k_batch, Hk, keys, Dv, l);
    c.a.o = new_tensor(&c, result, q_batch, Hq, rows, Dv, l);
    c.a.lse = new_tensor(&c, HEED_F32, q_batch, Hq, rows, 1, NULL);
    c.g.d_o = new_tensor(&c, result, q_batch, Hq, rows, Dv, l);
    c.g.d_q = new_tensor(&c, gradient, q_batch, Hq, rows, D, l);
    c.g.d_k = new_tensor(&c, gradient, k_batch, Hk, keys, D, l);
    c.g.d_v = new_tensor(&c, gradient, k_batch, Hk, keys, Dv, l);
    fill_normal(&c.a.q, 1);
    fill_normal(&c.a.k, 1);
    fill_normal(&c.a.v, 1);
    fill_normal(&c.g.d_o, 1);
    poison_padding(&c);
    return c;
}

int64_t case_sequences(const test_case *c) { return c->a.offsets_q ? c->a.sequences : c->a.q.shape[0]; }

int64_t case_rows(const test_case *c) { return c->a.offsets_q ? c->a.max_rows : c->a.q.shape[2]; }

int64_t case_keys(const test_case *c)
{
    if (c->a.block_table)
        return c->a.block_table_columns * c->a.k.shape[2];
    return c->a.offsets_k ? c->a.max_keys : c->a.k.shape[2];
}

void case_mask(test_case *c, int64_t B, int64_t H, int64_t Sq, int64_t Sk, double density)
{
    c->a.mask = new_tensor(c, HEED_BOOL, B, H, Sq, Sk, NULL);
    for (int64_t n = 0; n < elements(&c->a.mask); n++)
        ((uint8_t *)c->a.mask.data)[n] = random_bits() % 1000 < 1000 * density ? (uint8_t)random_int(1, 255) : 0;
}

void case_bias(test_case *c, heed_dtype dtype, int64_t B, int64_t H, int64_t Sq, int64_t Sk)
{
    c->a.bias = new_tensor(c, dtype, B, H, Sq, Sk, NULL);
    c->g.d_bias = new_tensor(c, dtype, B, H, Sq, Sk, NULL);
    fill_normal(&c->a.bias, 1);
}

void case_alibi(test_case *c, int64_t B)
{
    c->a.alibi = new_tensor(c, HEED_F32, B, c->a.q.shape[1], 1, 1, NULL);
    fill_normal(&c->a.alibi, 0.25);
}

void case_sink(test_case *c)
{
    c->a.sink = new_tensor(c, HEED_F32, 1, c->a.q.shape[1], 1, 1, NULL);
    c->g.d_sink = new_tensor(c, HEED_F32, 1, c->a.q.shape[1], 1, 1, NULL);
    fill_normal(&c->a.sink, 1);
}

void case_d_lse(test_case *c)
{
    c->g.d_lse = new_tensor(c, HEED_F32, c->a.lse.shape[0], c->a.lse.shape[1], c->a.lse.shape[2], 1, NULL);
    fill_normal(&c->g.d_lse, 1);
}

static void write_tensor(char *text, size_t size, const char *name, const heed_tensor *t)
{
    size_t used = strlen(text);
    if (t->data)
        snprintf(text + used, size - used, " %s %s[%lld,%lld,%lld,%lld]", name, heed_dtype_name(t->dtype),
                 (long long)t->shape[0], (long long)t->shape[1], (long long)t->shape[2], (long long)t->shape[3]);
}

static void write_number(char *text, size_t size, const char *name, double x)
{
    size_t used = strlen(text);
    if (x != 0)
        snprintf(text + used, size - used, " %s=%g", name, x);
}

static void write_int32s(char *text, size_t size, const char *name, const int32_t *values, int64_t count)
{
    for (int64_t n = 0; n < count && values; n++)
        snprintf(text + strlen(text), size - strlen(text), "%s%s%s%d", n ? "," : " ", n ? "" : name, n ? "" : "=",
                 values[n]);
}

const char *case_text(const test_case *c)
{
    static char text[1500];
    const heed_attention *a = &c->a;
    size_t size = sizeof text;
    snprintf(text, size, "%s:", c->kernel.name ? c->kernel.name : "any row");
    write_tensor(text, size, "q", &a->q);
    write_tensor(text, size, "k", &a->k);
    write_tensor(text, size, "v", &a->v);
    write_tensor(text, size, "o", &a->o);
    write_tensor(text, size, "mask", &a->mask);
    write_tensor(text, size, "bias", &a->bias);
    write_tensor(text, size, "alibi", &a->alibi);
    write_tensor(text, size, "sink", &a->sink);
    write_tensor(text, size, "d_lse", &c->g.d_lse);
    write_number(text, size, "scale", a->scale);
    write_number(text, size, "zero_scale", a->zero_scale);
    write_number(text, size, "softcap", a->softcap);
    write_number(text, size, "causal", a->causal);
    if (a->windowed)
        snprintf(text + strlen(text), size - strlen(text), " window=[%lld,%lld]", (long long)a->window_left,
                 (long long)a->window_right);
    write_number(text, size, "align", a->align);
    write_number(text, size, "query_position", (double)a->query_position);
    write_number(text, size, "query_step", (double)a->query_step);
    write_number(text, size, "key_position", (double)a->key_position);
    write_number(text, size, "key_step", (double)a->key_step);
    write_number(text, size, "key_stride", (double)a->key_stride);
    write_number(text, size, "dropout", a->dropout);
    int64_t B = case_sequences(c);
    write_int32s(text, size, "lengths_q", a->lengths_q, B);
    write_int32s(text, size, "lengths_k", a->lengths_k, B);
    write_int32s(text, size, "offsets_q", a->offsets_q, B + 1);
    write_int32s(text, size, "offsets_k", a->offsets_k, B + 1);
    write_number(text, size, "threads", c->x.threads);
    write_number(text, size, "nondeterministic", c->x.nondeterministic);
    snprintf(text + strlen(text), size - strlen(text), " HEED_TEST_SEED=%llu", (unsigned long long)last_seed);
    return text;
}

/* ---- Running ---------------------------------------------------------------------------------------------------- */

static struct {
    const char *name;
    int64_t runs;
} counted[256];

static void count_run(const char *kernel)
{
    int n = 0;
    while (n < COUNT(counted) - 1 && counted[n].name && strcmp(counted[n].name, kernel) != 0)
        n++;
    counted[n].name = kernel;
    counted[n].runs++;
}

int64_t runs_of(const char *kernel)
{
    for (int n = 0; n < COUNT(counted) && counted[n].name; n++)
        if (strcmp(counted[n].name, kernel) == 0)
            return counted[n].runs;
    return 0;
}

int case_takes(const test_case *c, const heed_kernel_info *kernel)
{
    heed_exec x = c->x;
    size_t bytes;
    x.kernel = kernel->name;
    return heed_workspace_size(&c->a, kernel->backward ? &c->g : NULL, &x, &bytes) == HEED_OK;
}

heed_status case_exec(const test_case *c, heed_pass pass, heed_exec *x)
{
    const heed_gradient *g = pass == HEED_BACKWARD ? &c->g : NULL;
    *x = c->x;
    x->kernel = kernel_for(c, pass);
    heed_status status = heed_workspace_size(&c->a, g, x, &x->workspace_bytes);
    if (status == HEED_UNSUPPORTED) { /* the row may want leave to sum in any order */
        x->nondeterministic = 1;
        status = heed_workspace_size(&c->a, g, x, &x->workspace_bytes);
    }
    if (status == HEED_UNSUPPORTED) { /* the row does not take this problem: whichever does */
        x->nondeterministic = c->x.nondeterministic;
        x->kernel = NULL;
        status = heed_workspace_size(&c->a, g, x, &x->workspace_bytes);
    }
    return status;
}

heed_status case_try(test_case *c, heed_pass pass)
{
    heed_exec x;
    heed_status status = case_exec(c, pass, &x);
    if (status)
        return status;
    test_buffer workspace = buffer_new(x.workspace_bytes, 0);
    x.workspace = workspace.data;
    status = pass == HEED_BACKWARD ? heed_backward(&c->a, &c->g, &x) : heed_forward(&c->a, &x);
    const char *trouble = gpu_finish();
    if (trouble)
        fail_msg("CUDA: %s; %s", trouble, case_text(c));
    int intact = guards_intact(&workspace);
    buffer_free(&workspace);
    if (!intact)
        fail_msg("wrote outside the workspace of %zu bytes; %s", x.workspace_bytes, case_text(c));
    if (x.kernel)
        count_run(x.kernel);
    return status;
}

void case_guards(const test_case *c)
{
    for (int n = 0; n < c->buffer_count; n++) {
        if (!guards_intact(&c->buffers[n]))
            fail_msg("wrote outside buffer %d of %zu bytes; %s", n, c->buffers[n].bytes, case_text(c));
        if (!gaps_intact(&c->buffers[n]))
            fail_msg("wrote between the elements of buffer %d; %s", n, case_text(c));
    }
}

static void run_pass(test_case *c, heed_pass pass)
{
    heed_status status = case_try(c, pass);
    if (status)
        fail_msg("%s: %s; %s", heed_status_name(status), heed_last_error(), case_text(c));
    case_guards(c);
}

void case_forward(test_case *c) { run_pass(c, HEED_FORWARD); }

void case_backward(test_case *c) { run_pass(c, HEED_BACKWARD); }
