/* Entry of cuLaunchKernel on x86-64: the fast path of time/gate/fastpath.h in assembler. cuLaunchKernel has eleven
 * arguments. Compiled C code would save six registers and copy the arguments on the stack twice. This entry saves two
 * registers and copies the arguments once.
 *
 * Guarantee: the entry does what THROUGH_GATE of launch.c does, or jumps to the C function `any_SYMBOL` with all
 * arguments unchanged. It jumps in these cases:
 * - The thread has no slot, or is inside a launch.
 * - The first probe of the slot's table does not find the stream.
 * - The process has no membarrier.
 * - The gate word is new to the queue.
 * - The grant is barred.
 *
 * Registers: rax is the slot; r10 and r11 are scratch. After the two pushq, rbx is the slot and rbp the queue.
 * NULL_STREAM is the name (stream_named) of the stream NULL in this form of the call.
 */
#ifndef SHAREPOD_LAUNCH_ENTRY_H
#define SHAREPOD_LAUNCH_ENTRY_H

#include <stddef.h>

#include "process/process.h"
#include "time/gate/fastpath.h"

#define LAUNCH_ENTRY(symbol, NULL_STREAM, parameters)                                                                  \
    __attribute__((naked)) EXPORT CUresult symbol parameters {                                                         \
        __asm__(                                                                                                       \
            LAUNCH_ENTRY_CODE(#symbol)::[driver] "i"(sizeof(void *) * ENTRY_##symbol), [null_stream] "i"(NULL_STREAM), \
            [sequence] "i"(offsetof(struct slot, sequence)), [mask] "i"(offsetof(struct slot, remembered.mask)),       \
            [away] "i"(offsetof(struct slot, remembered.away)),                                                        \
            [key] "i"(offsetof(struct slot, remembered.own[0].key)),                                                   \
            [value] "i"(offsetof(struct slot, remembered.own[0].queue)), [factor] "i"(REMEMBERED_FACTOR),              \
            [needs_fence] "i"(offsetof(struct process, gate.no_membarrier)),                                           \
            [contexts] "i"(offsetof(struct process, gate.contexts)), [one] "i"(CONTEXTS_ONE),                          \
            [gate_word] "i"(offsetof(struct process, gate.word)), [metered] "i"(GATE_METERED),                         \
            [barred] "i"(offsetof(struct process, gate.barred)), [grant] "i"(offsetof(struct process, gate.grant)),    \
            [queue_word] "i"(offsetof(struct queue, word)), [launched] "i"(offsetof(struct queue, launched)),          \
            [due] "i"(offsetof(struct queue, due)));                                                                   \
    }

/* The five arguments on the stack take 40 bytes. Each pushq copies one of them and lowers the stack pointer by 8, so
 * the next one has the same offset. */
#define LAUNCH_ENTRY_CODE(symbol)                                                                                    \
    "   movq    passage_slot@gottpoff(%%rip), %%rax\n"                                                               \
    "   movq    %%fs:(%%rax), %%rax\n"                                                                               \
    "   movq    24(%%rsp), %%r10\n" /* the stream */                                                                 \
    "   testq   %%rax, %%rax\n"                                                                                      \
    "   jz      any_" symbol "\n"                                                                                    \
    "   cmpq    $2, %%r10\n" /* stream_is_default */                                                                 \
    "   jbe     2f\n"                                                                                                \
    "1: movabsq %[factor], %%r11\n" /* remembered_find */                                                            \
    "   imulq   %%r10, %%r11\n"                                                                                      \
    "   shrq    $32, %%r11\n"                                                                                        \
    "   andq    %c[mask](%%rax), %%r11\n"                                                                            \
    "   addq    %c[away](%%rax), %%r11\n"                                                                            \
    "   cmpq    %c[key](%%rax, %%r11), %%r10\n"                                                                      \
    "   jne     any_" symbol "\n"                                                                                    \
    "   movq    %c[value](%%rax, %%r11), %%r11\n"                                                                    \
    "   movq    %c[sequence](%%rax), %%r10\n" /* gate_enter_fast */                                                  \
    "   testb   $1, %%r10b\n"                                                                                        \
    "   jnz     any_" symbol "\n"                                                                                    \
    "   incq    %%r10\n"                                                                                             \
    "   movq    %%r10, %c[sequence](%%rax)\n"                                                                        \
    "   movq    the_process(%%rip), %%r10\n"                                                                         \
    "   cmpb    $0, %c[needs_fence](%%r10)\n"                                                                        \
    "   jne     3f\n"                                                                                                \
    "   movl    %c[gate_word](%%r10), %%r10d\n"                                                                      \
    "   cmpl    %c[queue_word](%%r11), %%r10d\n"                                                                     \
    "   jne     3f\n"                                                                                                \
    "   cmpq    $0, %c[driver]+entries_driver(%%rip)\n"                                                              \
    "   je      3f\n"                                                                                                \
    "   pushq   %%rbx\n   .cfi_adjust_cfa_offset 8\n   .cfi_rel_offset rbx, 0\n"                                     \
    "   pushq   %%rbp\n   .cfi_adjust_cfa_offset 8\n   .cfi_rel_offset rbp, 0\n"                                     \
    "   movq    %%rax, %%rbx\n"                                                                                      \
    "   movq    %%r11, %%rbp\n"                                                                                      \
    "   testb   %[metered], %%r10b\n"                                                                                \
    "   jnz     4f\n"                                                                                                \
    "5: pushq   56(%%rsp)\n   pushq   56(%%rsp)\n   pushq   56(%%rsp)\n   pushq   56(%%rsp)\n   pushq   56(%%rsp)\n" \
    "   .cfi_adjust_cfa_offset 40\n"                                                                                 \
    "   call    *%c[driver]+entries_driver(%%rip)\n"                                                                 \
    "   addq    $40, %%rsp\n   .cfi_adjust_cfa_offset -40\n"                                                         \
    "   testl   %%eax, %%eax\n"                                                                                      \
    "   jnz     6f\n"                                                                                                \
    "   movq    %c[launched](%%rbp), %%r10\n" /* gate_leave_fast */                                                  \
    "   incq    %%r10\n"                                                                                             \
    "   movq    %%r10, %c[launched](%%rbp)\n"                                                                        \
    "   incq    %c[sequence](%%rbx)\n"                                                                               \
    "   cmpq    %c[due](%%rbp), %%r10\n"                                                                             \
    "   jae     7f\n"                                                                                                \
    "8: .cfi_remember_state\n"                                                                                       \
    "   popq    %%rbp\n   .cfi_adjust_cfa_offset -8\n   .cfi_restore rbp\n"                                          \
    "   popq    %%rbx\n   .cfi_adjust_cfa_offset -8\n   .cfi_restore rbx\n"                                          \
    "   ret\n"                                                                                                       \
    "2: movq    the_process(%%rip), %%r11\n" /* a default stream, of the only context: by its name */                \
    "   cmpl    %[one], %c[contexts](%%r11)\n"                                                                       \
    "   jne     any_" symbol "\n"                                                                                    \
    "   testq   %%r10, %%r10\n"                                                                                      \
    "   jnz     1b\n"                                                                                                \
    "   movl    %[null_stream], %%r10d\n"                                                                            \
    "   jmp     1b\n"                                                                                                \
    "3: decq    %c[sequence](%%rax)\n" /* nothing has happened */                                                    \
    "   jmp     any_" symbol "\n"                                                                                    \
    "   .cfi_restore_state\n"                                                                                        \
    "4: movq    the_process(%%rip), %%r10\n" /* gate_barred */                                                       \
    "   movq    %c[barred](%%r10), %%r11\n"                                                                          \
    "   movq    (%%r11), %%r11\n"                                                                                    \
    "   cmpq    %c[grant](%%r10), %%r11\n"                                                                           \
    "   jb      5b\n"                                                                                                \
    "   decq    %c[sequence](%%rbx)\n"                                                                               \
    "   .cfi_remember_state\n"                                                                                       \
    "   popq    %%rbp\n   .cfi_adjust_cfa_offset -8\n   .cfi_restore rbp\n"                                          \
    "   popq    %%rbx\n   .cfi_adjust_cfa_offset -8\n   .cfi_restore rbx\n"                                          \
    "   jmp     any_" symbol "\n"                                                                                    \
    "   .cfi_restore_state\n"                                                                                        \
    "6: incq    %c[sequence](%%rbx)\n" /* the driver refused the launch */                                           \
    "   jmp     8b\n"                                                                                                \
    "7: movq    %%rbx, %%rdi\n"                                                                                      \
    "   movq    %%rbp, %%rsi\n"                                                                                      \
    "   popq    %%rbp\n   .cfi_adjust_cfa_offset -8\n   .cfi_restore rbp\n"                                          \
    "   popq    %%rbx\n   .cfi_adjust_cfa_offset -8\n   .cfi_restore rbx\n"                                          \
    "   jmp     launched\n"

#endif
