/* The system calls of a batch of chunks, in one call that does not hold the interpreter lock.
 *
 * Python releases and reacquires the lock at each system call, and a chunk needs up to eleven.
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

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define NO_TIME (-1)
#define NS_PER_S 1000000000LL
/* As in chunks.py. */
#define STORED_DIGITS 271800
#define STORED_NS 1000000
#define USE_NS 100
#define MOST_EARLIER_USES 15
#define SAME_USE_NS NS_PER_S

enum outcome { NOT_DONE = 0, DONE = 1, ABSENT = 2 };

/* The arguments that all files of a call share. */
struct call {
    int namespace_fd;
    int temporaries_fd;
    int flags; /* O_DIRECT or 0 */
    int strict; /* skip a shard that other users could change: Directories refuses it */
    Py_ssize_t object_bytes;
    long long latest_ns, expired_ns, aged_ns; /* chunks.Lifetime */
};

/* One file. Fields that a call does not need stay empty. */
struct file {
    const char *temporary;
    int is_spare; /* the temporary file exists and is overwritten */
    const char *shard;
    const char *name;
    Py_buffer header;
    Py_buffer payload;
    long long used_ns;
};

/* The functions below make the system calls, without the interpreter lock. */

/* Return nanoseconds; -1 for a time before the epoch or later than a lifetime allows. */
static long long ns_of(struct timespec time, long long latest_ns)
{
    if (time.tv_sec < 0 || time.tv_sec > latest_ns / NS_PER_S)
        return -1;
    long long ns = time.tv_sec * NS_PER_S + time.tv_nsec;
    return ns <= latest_ns ? ns : -1;
}

/* As chunks.Lifetime.used_ns. */
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

/* As chunks.next_use_ns. */
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

static bool is_usable(const struct call *call, const struct stat *status)
{
    return S_ISREG(status->st_mode) && status->st_size == call->object_bytes
           && used_ns_of(call, status) >= call->expired_ns;
}

static int open_shard(const struct call *call, const struct file *file)
{
    struct stat status;
    int fd = openat(call->namespace_fd, file->shard,
                    O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || !call->strict)
        return fd;
    /* As directories._permission_fault. */
    if (fstat(fd, &status) == 0 && (status.st_uid == geteuid() || status.st_uid == 0)
        && !(status.st_mode & (S_IWGRP | S_IWOTH)))
        return fd;
    close(fd);
    return -1;
}

static bool read_open(const struct call *call, const struct file *file, int fd)
{
    struct stat status;
    struct iovec vectors[2] = {{file->header.buf, (size_t)file->header.len},
                               {file->payload.buf, (size_t)file->payload.len}};
    if (fstat(fd, &status) != 0 || !is_usable(call, &status))
        return false;
    if (preadv(fd, vectors, 2, 0) != file->header.len + file->payload.len)
        return false;
    struct timespec used = time_after(call, &status, file->used_ns);
    /* Ignore errors: the bytes were read, and recency matters less. */
    (void)futimens(fd, (struct timespec[2]){status.st_atim, used});
    return true;
}

static enum outcome read_one(const struct call *call, const struct file *file)
{
    int shard_fd = open_shard(call, file);
    if (shard_fd < 0)
        return NOT_DONE;
    bool is_read = false;
    /* O_NONBLOCK, because opening a pipe of this name would block. */
    int fd = openat(shard_fd, file->name,
                    O_RDONLY | O_NOATIME | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC | call->flags);
    if (fd >= 0) {
        is_read = read_open(call, file, fd);
        close(fd);
    }
    close(shard_fd);
    return is_read ? DONE : NOT_DONE;
}

/* As file_io.is_sole_owner. By default the kernel ends a process that holds up another's open. */
static bool is_sole_owner(int fd, off_t bytes)
{
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1
           && status.st_size == bytes && fcntl(fd, F_SETSIG, SIGURG) == 0
           && fcntl(fd, F_SETLEASE, F_WRLCK) == 0
           && fcntl(fd, F_SETLEASE, F_UNLCK) == 0;
}

static bool write_open(const struct file *file, int fd)
{
    struct iovec vectors[2] = {{file->header.buf, (size_t)file->header.len},
                               {file->payload.buf, (size_t)file->payload.len}};
    Py_ssize_t bytes = file->header.len + file->payload.len;
    /* As chunks.stored_time_ns. */
    struct timespec stored = time_of(file->used_ns / STORED_NS * STORED_NS + STORED_DIGITS);
    struct timespec used = time_of(file->used_ns);
    if (file->is_spare && !is_sole_owner(fd, bytes))
        return false;
    return pwritev(fd, vectors, 2, 0) == bytes
           && futimens(fd, (struct timespec[2]){stored, used}) == 0;
}

static enum outcome write_one(const struct call *call, const struct file *file)
{
    int how = file->is_spare ? O_NONBLOCK : O_CREAT | O_EXCL;
    int fd = openat(call->temporaries_fd, file->temporary,
                    O_WRONLY | O_NOFOLLOW | O_CLOEXEC | how | call->flags, 0600);
    if (fd < 0)
        return NOT_DONE;
    bool is_written = write_open(file, fd);
    if (close(fd) == 0 && is_written)
        return DONE;
    (void)unlinkat(call->temporaries_fd, file->temporary, 0);
    return NOT_DONE;
}

static enum outcome place_one(const struct call *call, const struct file *file)
{
    int shard_fd = open_shard(call, file);
    if (shard_fd < 0)
        return NOT_DONE;
    int failed = renameat(call->temporaries_fd, file->temporary, shard_fd, file->name);
    close(shard_fd);
    return failed ? NOT_DONE : DONE;
}

static enum outcome touch_one(const struct call *call, const struct file *file)
{
    int shard_fd = open_shard(call, file);
    if (shard_fd < 0)
        return NOT_DONE;
    struct stat status;
    enum outcome outcome = NOT_DONE;
    if (fstatat(shard_fd, file->name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            outcome = ABSENT;
    } else if (is_usable(call, &status)) {
        struct timespec used = time_after(call, &status, file->used_ns);
        if (file->used_ns == NO_TIME
            || utimensat(shard_fd, file->name, (struct timespec[2]){status.st_atim, used},
                         AT_SYMLINK_NOFOLLOW) == 0)
            outcome = DONE;
    }
    close(shard_fd);
    return outcome;
}

/* The functions below need the interpreter lock. */

typedef enum outcome (*operation)(const struct call *, const struct file *);
typedef int (*parser)(PyObject *, struct file *);

/* Parse each file, work on all of them without the lock, and return a byte for each. */
static PyObject *run(const struct call *call, PyObject *items, parser parse, operation operate)
{
    Py_ssize_t count = PyTuple_Size(items), parsed = 0;
    struct file *files = PyMem_Calloc((size_t)count, sizeof(struct file));
    /* Allocate the result first: after the work nothing may fail. */
    PyObject *outcomes = PyBytes_FromStringAndSize(NULL, count);
    if (files == NULL || outcomes == NULL) {
        PyMem_Free(files);
        Py_XDECREF(outcomes);
        return PyErr_NoMemory();
    }
    char *outcome = PyBytes_AsString(outcomes);
    while (parsed < count && parse(PyTuple_GetItem(items, parsed), &files[parsed]))
        parsed++;
    if (parsed == count) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t index = 0; index < count; index++)
            outcome[index] = (char)operate(call, &files[index]);
        Py_END_ALLOW_THREADS
    } else {
        Py_CLEAR(outcomes);
    }
    for (Py_ssize_t index = 0; index < parsed; index++) {
        PyBuffer_Release(&files[index].header);
        PyBuffer_Release(&files[index].payload);
    }
    PyMem_Free(files);
    return outcomes;
}

static int parse_read(PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "ssw*w*L", &file->shard, &file->name, &file->header,
                            &file->payload, &file->used_ns);
}

static int parse_written(PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "spy*y*L", &file->temporary, &file->is_spare, &file->header,
                            &file->payload, &file->used_ns);
}

static int parse_placed(PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "sss", &file->temporary, &file->shard, &file->name);
}

static int parse_touched(PyObject *item, struct file *file)
{
    return PyArg_ParseTuple(item, "ssL", &file->shard, &file->name, &file->used_ns);
}

/* The arguments have the same order as in the stub. */
static PyObject *py_read(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "inip(LLL)O!", &call.namespace_fd, &call.object_bytes,
                          &call.flags, &call.strict, &call.latest_ns, &call.expired_ns,
                          &call.aged_ns, &PyTuple_Type, &items))
        return NULL;
    return run(&call, items, parse_read, read_one);
}

static PyObject *py_write(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "iiO!", &call.temporaries_fd, &call.flags, &PyTuple_Type,
                          &items))
        return NULL;
    return run(&call, items, parse_written, write_one);
}

static PyObject *py_place(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "iipO!", &call.temporaries_fd, &call.namespace_fd,
                          &call.strict, &PyTuple_Type, &items))
        return NULL;
    return run(&call, items, parse_placed, place_one);
}

static PyObject *py_touch(PyObject *module, PyObject *arguments)
{
    struct call call = {0};
    PyObject *items;
    if (!PyArg_ParseTuple(arguments, "inp(LLL)O!", &call.namespace_fd, &call.object_bytes,
                          &call.strict, &call.latest_ns, &call.expired_ns, &call.aged_ns,
                          &PyTuple_Type, &items))
        return NULL;
    return run(&call, items, parse_touched, touch_one);
}

static PyMethodDef methods[] = {
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
