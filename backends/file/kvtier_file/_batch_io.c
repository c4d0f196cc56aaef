/* Makes a batch's system calls and digests in one call, without the interpreter lock.
 *
 * Python releases and reacquires the lock at each system call. A chunk needs up to eleven calls.
 * Large batches are divided among threads that end with the call. A thread digests each chunk right
 * after the read or before the write, while the bytes are in the processor's cache. Only to seal a
 * header, a thread acquires the lock.
 * This code handles only the usual cases. A file that is missing, foreign, damaged, expired or
 * refused is left unchanged and reported as not done. The Python code then handles the file and
 * reports the error.
 *
 * namespace.py describes the files' layout and the rule that no symbolic link is followed.
 * _batch_io.pyi describes the functions' arguments and results.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one build for Python 3.11 and all later versions */
#include <Python.h>

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The same value as in file_io.py. */
#define ALIGNMENT 4096
#define NO_TIME (-1)
#define NS_PER_S 1000000000LL
/* The same values as in chunks.py. */
#define STORED_DIGITS 271800
#define STORED_NS 1000000
#define USE_NS 100
#define MOST_EARLIER_USES 15
#define SAME_USE_NS NS_PER_S

/* With O_DIRECT, threads mostly wait for the disk, so a call uses many threads. With the page
 * cache, each thread keeps a processor busy, so a call uses fewer threads. */
#define DIRECT_BYTES_PER_THREAD (1 << 20)
#define CACHED_BYTES_PER_THREAD (8 << 20)
#define MOST_THREADS 8
#define DIGEST_BYTES 16
#define MOST_WAITS 1000 /* a millisecond each */
/* A piece fits into a processor's own cache. Smaller pieces would need more system calls. */
#define PIECE_BYTES (256 << 10)

enum outcome { NOT_DONE = 0, DONE = 1, ABSENT = 2 };

/* The xxh3-128 functions of the library that use_digests loaded, if has_digests is true. */
struct hash {
    uint64_t low, high;
};
static struct {
    void *(*create)(void);
    int (*release)(void *);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    struct hash (*result)(const void *);
} xxh3;
static bool has_digests;

/* The arguments that all files of a call share. */
struct call {
    int namespace_fd;
    int temporaries_fd;
    int flags; /* O_DIRECT or 0 */
    int strict; /* do nothing in a shard that other users could change */
    uid_t user; /* the effective user, found once, because geteuid is a system call */
    Py_ssize_t least_bytes, most_bytes; /* the lengths of files to touch */
    Py_ssize_t digest_bytes; /* maximum length of a payload's digested part; 0 for no digests */
    long long latest_ns, expired_ns, aged_ns; /* the fields of chunks.Lifetime */
};

/* A file of a batch. Fields that a call does not need stay empty. */
struct file {
    const char *temporary;
    int is_spare; /* the temporary file exists and is to be overwritten */
    const char *shard;
    const char *name;
    PyObject *transfer; /* a store's transfer, whose header is sealed with the digest */
    Py_buffer header;
    Py_buffer payload;
    long long used_ns;
    char *file_bytes; /* a read writes the file's length here, as an int64_t */
    unsigned char *digest;
};

/* The functions below run without the interpreter lock, except as noted. */

/* Return a time in nanoseconds, or -1 if the time is before the epoch or after latest_ns. */
static long long ns_of(struct timespec time, long long latest_ns)
{
    if (time.tv_sec < 0 || time.tv_sec > latest_ns / NS_PER_S)
        return -1;
    long long ns = time.tv_sec * NS_PER_S + time.tv_nsec;
    return ns <= latest_ns ? ns : -1;
}

/* The same rule as chunks.Lifetime.used_ns. */
static long long used_ns_of(const struct call *call, const struct stat *status)
{
    long long used_ns = ns_of(status->st_mtim, call->latest_ns);
    if (used_ns < 0)
        return 0;
    if (call->aged_ns != 0) {
        long long stored_ns = ns_of(status->st_atim, call->latest_ns);
        if (stored_ns < call->aged_ns || stored_ns % STORED_NS != STORED_DIGITS)
            return 0;
    }
    return used_ns;
}

static struct timespec time_of(long long used_ns)
{
    return (struct timespec){used_ns / NS_PER_S, used_ns % NS_PER_S};
}

/* The same rule as chunks.next_use_ns. */
static struct timespec time_after(const struct call *call, const struct stat *status,
                                  long long used_ns)
{
    long long known_ns = used_ns_of(call, status);
    long long earlier = known_ns % USE_NS;
    if (earlier > MOST_EARLIER_USES)
        earlier = 0;
    if (used_ns / SAME_USE_NS > known_ns / SAME_USE_NS && earlier < MOST_EARLIER_USES)
        earlier++;
    long long now = used_ns / USE_NS, next = known_ns / USE_NS + 1;
    return time_of((now > next ? now : next) * USE_NS + earlier);
}

/* The lengths follow the same rule as namespace.NamespaceDirectory.lengths. */
static bool is_usable(const struct call *call, const struct stat *status, off_t least_bytes,
                      off_t most_bytes)
{
    return S_ISREG(status->st_mode) && status->st_size >= least_bytes
           && status->st_size <= most_bytes && status->st_size % ALIGNMENT == 0
           && used_ns_of(call, status) >= call->expired_ns;
}

/* On NFS, only an open (without O_PATH) makes the files of other machines visible at once. */
static int open_shard(const struct call *call, const struct file *file)
{
    struct stat status;
    int fd = openat(call->namespace_fd, file->shard,
                    O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || !call->strict)
        return fd;
    /* The same rule as directories._permission_fault. */
    if (fstat(fd, &status) == 0 && (status.st_uid == call->user || status.st_uid == 0)
        && !(status.st_mode & (S_IWGRP | S_IWOTH)))
        return fd;
    close(fd);
    return -1;
}

static Py_ssize_t least(Py_ssize_t one, Py_ssize_t other)
{
    return one < other ? one : other;
}

/* Write a digest in its canonical form, which is big-endian. */
static void write_digest(struct hash hash, unsigned char *digest)
{
    uint64_t words[2] = {htobe64(hash.high), htobe64(hash.low)};
    memcpy(digest, words, DIGEST_BYTES);
}

/* Read a part of the payload, from the offset `at`. If `at` is 0, read the header too. */
static bool read_piece(const struct file *file, int fd, Py_ssize_t at, Py_ssize_t bytes)
{
    struct iovec vectors[2] = {{file->header.buf, (size_t)file->header.len},
                               {(char *)file->payload.buf + at, (size_t)bytes}};
    if (at > 0)
        return preadv(fd, &vectors[1], 1, file->header.len + at) == bytes;
    return preadv(fd, vectors, 2, 0) == file->header.len + bytes;
}

/* Digest the first `length` bytes of the payload's buffer. If fd is not -1, fill the buffers of the
 * header and the payload from the file first. Without O_DIRECT, read in pieces, to digest each
 * piece while it is still in the processor's cache. */
static bool digest_payload(const struct call *call, const struct file *file, int fd,
                           Py_ssize_t length)
{
    bool is_digested = call->digest_bytes > 0;
    bool in_pieces = is_digested && !(call->flags & O_DIRECT);
    void *state = is_digested ? xxh3.create() : NULL;
    bool is_good = !is_digested || (state != NULL && xxh3.reset(state) == 0);
    Py_ssize_t at = 0, bytes;
    do {
        bytes = least(in_pieces ? PIECE_BYTES : PY_SSIZE_T_MAX, length - at);
        is_good = is_good && (fd < 0 || read_piece(file, fd, at, bytes));
        if (is_good && at < call->digest_bytes) {
            char *piece = (char *)file->payload.buf + at;
            is_good = xxh3.update(state, piece, (size_t)least(bytes, call->digest_bytes - at)) == 0;
        }
        at += bytes;
    } while (is_good && at < length);
    if (is_good && is_digested)
        write_digest(xxh3.result(state), file->digest);
    if (state != NULL)
        (void)xxh3.release(state);
    return is_good;
}

static bool read_open(const struct call *call, const struct file *file, int fd)
{
    struct stat status;
    Py_ssize_t header = file->header.len;
    if (fstat(fd, &status) != 0
        || !is_usable(call, &status, header + 1, header + file->payload.len))
        return false;
    int64_t bytes = status.st_size;
    memcpy(file->file_bytes, &bytes, sizeof bytes);
    if (!digest_payload(call, file, fd, bytes - header))
        return false;
    struct timespec used = time_after(call, &status, file->used_ns);
    /* Ignore errors, because the bytes were read and the time of the use matters less. */
    (void)futimens(fd, (struct timespec[2]){status.st_atim, used});
    return true;
}

static enum outcome read_one(const struct call *call, struct file *file)
{
    int shard_fd = open_shard(call, file);
    if (shard_fd < 0)
        return NOT_DONE;
    bool is_read = false;
    /* Without O_NONBLOCK, opening a pipe of this name would block. */
    int fd = openat(shard_fd, file->name,
                    O_RDONLY | O_NOATIME | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC | call->flags);
    if (fd >= 0) {
        is_read = read_open(call, file, fd);
        close(fd);
    }
    close(shard_fd);
    return is_read ? DONE : NOT_DONE;
}

/* The same rule as file_io.take_over, where comments explain the signal. */
static bool take_over(int fd, off_t bytes)
{
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1
           && fcntl(fd, F_SETSIG, SIGURG) == 0
           && fcntl(fd, F_SETLEASE, F_WRLCK) == 0
           && fcntl(fd, F_SETLEASE, F_UNLCK) == 0
           && (status.st_size <= bytes || ftruncate(fd, bytes) == 0);
}

/* Needs the interpreter lock. */
static bool get_header(struct file *file)
{
    PyObject *header = PyObject_GetAttrString(file->transfer, "header");
    bool is_got = header != NULL && PyObject_GetBuffer(header, &file->header, PyBUF_SIMPLE) == 0;
    Py_XDECREF(header);
    return is_got;
}

/* No thread may ask for the interpreter lock once the interpreter ends. */
static atomic_bool is_ending;
static atomic_int sealing;

/* Let the transfer write the header with the payload's digest. */
static bool seal_header(struct file *file)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *sealed = PyObject_CallMethod(file->transfer, "seal", "y#", file->digest,
                                           (Py_ssize_t)DIGEST_BYTES);
    bool is_sealed = sealed != NULL && get_header(file);
    if (!is_sealed)
        PyErr_Clear();
    Py_XDECREF(sealed);
    PyGILState_Release(state);
    return is_sealed;
}

static bool seal(const struct call *call, struct file *file)
{
    if (!digest_payload(call, file, -1, file->payload.len))
        return false;
    atomic_fetch_add(&sealing, 1);
    bool is_sealed = !atomic_load(&is_ending) && seal_header(file);
    atomic_fetch_sub(&sealing, 1);
    return is_sealed;
}

static bool write_open(const struct file *file, int fd)
{
    struct iovec vectors[2] = {{file->header.buf, (size_t)file->header.len},
                               {file->payload.buf, (size_t)file->payload.len}};
    Py_ssize_t bytes = file->header.len + file->payload.len;
    /* The same rule as chunks.stored_time_ns. */
    struct timespec stored = time_of(file->used_ns / STORED_NS * STORED_NS + STORED_DIGITS);
    struct timespec used = time_of(file->used_ns);
    if (file->is_spare && !take_over(fd, bytes))
        return false;
    return pwritev(fd, vectors, 2, 0) == bytes
           && futimens(fd, (struct timespec[2]){stored, used}) == 0;
}

static enum outcome write_one(const struct call *call, struct file *file)
{
    int how = file->is_spare ? O_NONBLOCK : O_CREAT | O_EXCL;
    int fd = -1;
    if (call->digest_bytes == 0 || seal(call, file))
        fd = openat(call->temporaries_fd, file->temporary,
                    O_WRONLY | O_NOFOLLOW | O_CLOEXEC | how | call->flags, 0600);
    bool is_written = fd >= 0 && write_open(file, fd);
    if (fd >= 0 && close(fd) == 0 && is_written)
        return DONE;
    if (fd >= 0 || file->is_spare)
        (void)unlinkat(call->temporaries_fd, file->temporary, 0);
    return NOT_DONE;
}

static enum outcome place_one(const struct call *call, struct file *file)
{
    int shard_fd = open_shard(call, file);
    if (shard_fd < 0)
        return NOT_DONE;
    int failed = renameat(call->temporaries_fd, file->temporary, shard_fd, file->name);
    close(shard_fd);
    return failed ? NOT_DONE : DONE;
}

static enum outcome touch_one(const struct call *call, struct file *file)
{
    int shard_fd = open_shard(call, file);
    if (shard_fd < 0)
        return NOT_DONE;
    struct stat status;
    enum outcome outcome = NOT_DONE;
    if (fstatat(shard_fd, file->name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            outcome = ABSENT;
    } else if (is_usable(call, &status, call->least_bytes, call->most_bytes)) {
        struct timespec used = time_after(call, &status, file->used_ns);
        if (file->used_ns == NO_TIME
            || utimensat(shard_fd, file->name, (struct timespec[2]){status.st_atim, used},
                         AT_SYMLINK_NOFOLLOW) == 0)
            outcome = DONE;
    }
    close(shard_fd);
    return outcome;
}

typedef enum outcome (*operation)(const struct call *, struct file *);

/* The state that the threads of one call share. */
struct work {
    const struct call *call;
    struct file *files;
    operation operate;
    Py_ssize_t count;
    _Atomic Py_ssize_t next;
    char *outcome;
};

static void *work_on(void *shared)
{
    struct work *work = shared;
    Py_ssize_t index;
    while ((index = atomic_fetch_add(&work->next, 1)) < work->count)
        work->outcome[index] = (char)work->operate(work->call, &work->files[index]);
    return NULL;
}

/* Divide the work among this thread and new threads. If the system refuses a thread, use fewer. */
static void work_in_threads(struct work *work)
{
    pthread_t helpers[MOST_THREADS - 1];
    sigset_t all, before;
    Py_ssize_t bytes = 0, started = 0;
    for (Py_ssize_t index = 0; index < work->count; index++)
        bytes += work->files[index].payload.len;
    bool is_direct = work->call->flags & O_DIRECT;
    Py_ssize_t wanted = bytes / (is_direct ? DIRECT_BYTES_PER_THREAD : CACHED_BYTES_PER_THREAD);
    wanted = least(wanted, least(work->count, MOST_THREADS));
    /* sysconf reads a file of /sys, so call it only if the result may matter. */
    if (wanted > 1 && !is_direct)
        wanted = least(wanted, sysconf(_SC_NPROCESSORS_ONLN));
    if (wanted > 1) {
        /* Block all signals in the new threads: the interpreter's threads must handle them. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (started < wanted - 1
               && pthread_create(&helpers[started], NULL, work_on, work) == 0)
            started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work_on(work);
    while (started > 0)
        pthread_join(helpers[--started], NULL);
}

/* The functions below need the interpreter lock. */

/* Clear O_DIRECT on tmpfs, which accepts the flag although it has no disk to wait for. */
static int real_flags(int directory_fd, int flags)
{
    struct statfs status;
    bool is_memory = fstatfs(directory_fd, &status) == 0 && status.f_type == TMPFS_MAGIC;
    return is_memory ? flags & ~O_DIRECT : flags;
}

typedef int (*parser)(const struct call *, PyObject *, struct file *);

/* Parse all items, and then handle the files without the lock. Return an outcome for each file, the
 * lengths of read files, and the joined digests, which are empty without a library. */
static PyObject *run(struct call *call, PyObject *items, parser parse, operation operate)
{
    if (call->digest_bytes < 0) {
        PyErr_SetString(PyExc_ValueError, "a negative length");
        return NULL;
    }
    if (!has_digests)
        call->digest_bytes = 0;
    call->user = geteuid();
    Py_ssize_t count = PyTuple_Size(items), parsed = 0;
    Py_ssize_t digest_bytes = call->digest_bytes ? DIGEST_BYTES : 0;
    struct file *files = PyMem_Calloc((size_t)count, sizeof(struct file));
    /* Allocate the results first, because nothing may fail after the work. */
    PyObject *outcomes = PyBytes_FromStringAndSize(NULL, count);
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    PyObject *digests = PyBytes_FromStringAndSize(NULL, count * digest_bytes);
    PyObject *result = NULL;
    if (outcomes != NULL && lengths != NULL && digests != NULL)
        result = PyTuple_Pack(3, outcomes, lengths, digests);
    if (files == NULL || result == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    while (parsed < count && parse(call, PyTuple_GetItem(items, parsed), &files[parsed])) {
        files[parsed].file_bytes = PyBytes_AsString(lengths) + parsed * sizeof(int64_t);
        files[parsed].digest = (unsigned char *)PyBytes_AsString(digests) + parsed * digest_bytes;
        parsed++;
    }
    if (parsed == count) {
        struct work work = {call, files, operate, count, 0, PyBytes_AsString(outcomes)};
        Py_BEGIN_ALLOW_THREADS
        work_in_threads(&work);
        Py_END_ALLOW_THREADS
    } else {
        Py_CLEAR(result);
    }
    /* If an item could not be parsed, it may have a buffer too. */
    for (Py_ssize_t index = 0; index < count; index++) {
        PyBuffer_Release(&files[index].header);
        PyBuffer_Release(&files[index].payload);
    }
end:
    PyMem_Free(files);
    Py_XDECREF(outcomes);
    Py_XDECREF(lengths);
    Py_XDECREF(digests);
    return result;
}

/* Return an item of a tuple, and release the tuple. */
static PyObject *item_of(PyObject *tuple, Py_ssize_t index)
{
    PyObject *item = tuple ? PyTuple_GetItem(tuple, index) : NULL;
    Py_XINCREF(item);
    Py_XDECREF(tuple);
    return item;
}

static int parse_read(const struct call *call, PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "ssw*w*L", &file->shard, &file->name, &file->header,
                            &file->payload, &file->used_ns);
}

static int parse_written(const struct call *call, PyObject *item, struct file *file)
{
    PyObject *payload;
    if (!PyArg_ParseTuple(item, "spOL", &file->temporary, &file->is_spare, &file->transfer,
                          &file->used_ns))
        return 0;
    payload = PyObject_GetAttrString(file->transfer, "payload");
    if (payload == NULL)
        return 0;
    int is_parsed = PyObject_GetBuffer(payload, &file->payload, PyBUF_SIMPLE) == 0
                    && (call->digest_bytes > 0 || get_header(file));
    Py_DECREF(payload);
    return is_parsed;
}

static int parse_placed(const struct call *call, PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "sss", &file->temporary, &file->shard, &file->name);
}

static int parse_touched(const struct call *call, PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "ssL", &file->shard, &file->name, &file->used_ns);
}

/* The py_ functions below take their arguments in the order that _batch_io.pyi declares. */
static bool find_function(void *library, const char *name, void *function)
{
    void *found = library ? dlsym(library, name) : NULL;
    /* Copy the pointer, because ISO C forbids a cast from void * to a function pointer. */
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

static PyObject *py_use_digests(PyObject *module, PyObject *arguments)
{
    const char *path;
    if (!PyArg_ParseTuple(arguments, "s", &path))
        return NULL;
    /* Never close the library, because its functions are used until the process ends. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    has_digests = find_function(library, "XXH3_createState", &xxh3.create)
                  && find_function(library, "XXH3_freeState", &xxh3.release)
                  && find_function(library, "XXH3_128bits_reset", &xxh3.reset)
                  && (find_function(library, "XXH3_128bits_update_dispatch", &xxh3.update)
                      || find_function(library, "XXH3_128bits_update", &xxh3.update))
                  && find_function(library, "XXH3_128bits_digest", &xxh3.result);
    return PyBool_FromLong(has_digests);
}

static PyObject *py_digest(PyObject *module, PyObject *arguments)
{
    unsigned char digest[DIGEST_BYTES];
    struct call call = {0};
    struct file file = {.digest = digest};
    if (!has_digests) {
        PyErr_SetString(PyExc_ValueError, "no library is loaded");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "y*", &file.payload))
        return NULL;
    call.digest_bytes = PY_SSIZE_T_MAX;
    bool is_good = digest_payload(&call, &file, -1, file.payload.len);
    PyBuffer_Release(&file.payload);
    return is_good ? PyBytes_FromStringAndSize((char *)digest, DIGEST_BYTES) : PyErr_NoMemory();
}

static PyObject *py_stop_sealing(PyObject *module, PyObject *arguments)
{
    struct timespec millisecond = {0, 1000000};
    atomic_store(&is_ending, true);
    Py_BEGIN_ALLOW_THREADS
    /* After a fork, the count may include threads that exist only in the parent process. */
    for (int waits = 0; atomic_load(&sealing) > 0 && waits < MOST_WAITS; waits++)
        (void)nanosleep(&millisecond, NULL);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_read(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "inip(LLL)O!", &call.namespace_fd, &call.digest_bytes,
                          &call.flags, &call.strict, &call.latest_ns, &call.expired_ns,
                          &call.aged_ns, &PyTuple_Type, &items))
        return NULL;
    call.flags = real_flags(call.namespace_fd, call.flags);
    return run(&call, items, parse_read, read_one);
}

static PyObject *py_write(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "iniO!", &call.temporaries_fd, &call.digest_bytes,
                          &call.flags, &PyTuple_Type, &items))
        return NULL;
    call.flags = real_flags(call.temporaries_fd, call.flags);
    return item_of(run(&call, items, parse_written, write_one), 0);
}

static PyObject *py_place(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "iipO!", &call.temporaries_fd, &call.namespace_fd,
                          &call.strict, &PyTuple_Type, &items))
        return NULL;
    return item_of(run(&call, items, parse_placed, place_one), 0);
}

static PyObject *py_touch(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "i(nn)p(LLL)O!", &call.namespace_fd, &call.least_bytes,
                          &call.most_bytes, &call.strict, &call.latest_ns, &call.expired_ns,
                          &call.aged_ns, &PyTuple_Type, &items))
        return NULL;
    return item_of(run(&call, items, parse_touched, touch_one), 0);
}

static PyMethodDef methods[] = {
    {"use_digests", py_use_digests, METH_VARARGS, NULL},
    {"digest", py_digest, METH_VARARGS, NULL},
    {"stop_sealing", py_stop_sealing, METH_NOARGS, NULL},
    {"read", py_read, METH_VARARGS, NULL},
    {"write", py_write, METH_VARARGS, NULL},
    {"place", py_place, METH_VARARGS, NULL},
    {"touch", py_touch, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_batch_io",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__batch_io(void)
{
    return PyModuleDef_Init(&definition);
}
